"""Tests of the lock of a run folder, and of the removal of a new folder without results."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.core.errors import RunError, UserError
from rlhf.runs import lock
from rlhf.runs.lock import claimed, refuse_locked

HOLDER = """
import sys, time
from pathlib import Path
from rlhf.runs.lock import claimed
with claimed(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def holder(folder):
    """Lock the folder in another process, and return that process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@pytest.mark.process
def test_a_folder_in_use_is_refused_and_the_message_names_the_process(folder, holder):
    for enter in (refuse_locked, lambda path: claimed(path).__enter__()):
        with pytest.raises(UserError) as refused:
            enter(folder)
        text = str(refused.value)
        assert f"process {holder.pid} on " in text and f", got {folder}; " in text
        assert text.endswith(f"or stop it: kill {holder.pid}")


@pytest.mark.process
def test_kill_9_ends_the_lock(folder, holder, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 10.0)
    holder.send_signal(signal.SIGKILL)
    with claimed(folder):
        assert str(os.getpid()) in (folder / lock.LOCK).read_text()


@pytest.mark.process
def test_a_requeued_slurm_job_ignores_the_lock_of_its_earlier_session(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with claimed(folder):
        with pytest.raises(UserError, match="another process"):
            refuse_locked(folder)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        refuse_locked(folder)
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with pytest.raises(UserError, match="another process"):
            refuse_locked(folder)


def test_the_lock_file_is_removed_at_the_end(folder):
    with claimed(folder):
        assert (folder / lock.LOCK).exists()
    assert list(folder.iterdir()) == []
    (folder / lock.LOCK).touch()  # left behind by kill -9
    refuse_locked(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_is_not_locked_where_the_file_system_has_no_locks(folder, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with claimed(folder):
        refuse_locked(folder)


SETTINGS = ("config.yaml", "environment.json", "train.log")


def test_a_refused_run_removes_its_new_folder_without_results(folder):
    with pytest.raises(UserError), claimed(folder):
        for name in SETTINGS:
            (folder / name).write_text("text")
        (folder / "metrics.jsonl").touch()
        (folder / "wandb").mkdir()
        (folder / "wandb" / "run_id").write_text("1")
        raise UserError("wrong data")
    assert not folder.exists()


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoint-1/COMPLETE", "model/model.safetensors"])
def test_a_refused_run_keeps_a_folder_with_results(folder, result):
    with pytest.raises(UserError), claimed(folder):
        (folder / result).parent.mkdir(exist_ok=True)
        (folder / result).write_text("{}")
        raise UserError("wrong data")
    assert (folder / result).exists()


def test_a_folder_that_existed_before_or_of_another_error_is_kept(folder):
    with pytest.raises(RunError), claimed(folder):
        (folder / "train.log").write_text("an earlier error")
        raise RunError("a failure of the run")
    with pytest.raises(UserError), claimed(folder):
        raise UserError("wrong data")
    assert (folder / "train.log").exists()
