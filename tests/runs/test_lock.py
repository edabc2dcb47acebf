"""Tests of the lock of a folder, of messages about its owner, and of the removal of a new folder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.core.errors import RunError, UserError
from rlhf.runs import lock
from rlhf.runs.lock import check_unlocked, claimed, made_by_one, written_by_one

HOLDER = """
import sys, time
from pathlib import Path
from rlhf.runs.lock import claimed
with claimed(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""

WAITER = """
import sys
from pathlib import Path
from rlhf.core.errors import Interrupted
from rlhf.processes.signals import interruptible
from rlhf.runs import lock
lock._QUIET_S = 0.2
try:
    with interruptible(), lock.claimed(Path(sys.argv[1]), wait=True):
        print("locked", flush=True)
except Interrupted:
    sys.exit(75)
"""


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_S", 0.0)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start(folder):
    """`start(program)` starts a Python program that gets the folder as its argument."""
    processes = []

    def begin(program):
        command = [sys.executable, "-c", program, str(folder)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def holder(start):
    """Lock the folder in another process, and return that process."""
    process = start(HOLDER)
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.process
def test_a_folder_in_use_is_refused_and_the_message_names_the_process(folder, holder):
    for enter in (check_unlocked, lambda path: claimed(path).__enter__()):
        with pytest.raises(UserError) as refused:
            enter(folder)
        text = str(refused.value)
        assert f"process {holder.pid} on " in text and ", since 20" in text and f", got {folder}; " in text
        assert text.endswith(f"or stop it: kill {holder.pid}")


@pytest.mark.process
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)])
def test_a_process_that_waits_says_so_once_and_ends_at_a_signal(folder, holder, start, number, code):
    waiting = start(WAITER)
    text = waiting.stdout.readline()
    assert text.startswith(f"waiting for process {holder.pid} on ") and text.endswith(f" writes {folder}\n")
    time.sleep(0.5)
    waiting.send_signal(number)
    started = time.monotonic()
    rest, _ = waiting.communicate(timeout=20)
    assert time.monotonic() - started < 1
    assert waiting.returncode == code and "waiting for" not in rest
    assert (folder / lock.LOCK).exists()


def test_the_slurm_job_of_the_owner_is_named(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with (
        claimed(folder),
        pytest.raises(UserError, match="SLURM job 17.*, since .*, or stop its job: scancel 17$"),
    ):
        check_unlocked(folder)


def test_the_lock_file_is_removed_at_the_end(folder):
    folder.mkdir()
    (folder / "config.yaml").touch()
    with claimed(folder):
        assert (folder / lock.LOCK).exists()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    (folder / lock.LOCK).write_text("process 1 on x")  # left behind by kill -9
    check_unlocked(folder)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_a_folder_is_locked_where_the_file_system_has_no_kernel_locks(folder, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with claimed(folder):
        assert (folder / lock.LOCK).exists()


def test_an_evaluation_and_a_run_have_locks_of_their_own(folder):
    with (
        claimed(folder),
        claimed(folder, name=lock.EVALUATION_LOCK),
        pytest.raises(UserError, match="another process"),
    ):
        check_unlocked(folder, name=lock.EVALUATION_LOCK)
    assert not folder.exists()


def test_an_artefact_is_made_by_one_process_and_an_output_is_written_by_one_process(folder):
    for context in (made_by_one, written_by_one):
        with context(folder), pytest.raises(UserError, match=f"another process does.*, got {folder}; "):
            written_by_one(folder).__enter__()
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_is_empty_before_and_after_is_removed(folder):
    with pytest.raises(RunError), claimed(folder):
        raise RunError("a failure before any file was written")
    assert not folder.exists()


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


FORKS = """
import os, sys, time
from pathlib import Path
from rlhf.runs.lock import claimed
with claimed(Path(sys.argv[1])):
    if os.fork() == 0:  # the child reports, because it has the lock until it has run what follows a fork
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_a_forked_process_that_outlives_the_holder_does_not_keep_its_lock(folder, start):
    process = start(FORKS)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        check_unlocked(folder)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


IN_TURN = """
import sys, time
from pathlib import Path
from rlhf.runs.lock import locked
path = Path(sys.argv[1])
for _ in range(5):
    with locked(path / ".lock", path, wait=True):
        inside = path.with_name("inside")
        inside.open("x").close()  # fails if another process is inside
        time.sleep(0.02)
        inside.unlink()
"""


@pytest.mark.process
def test_processes_have_a_lock_in_turn(folder, start):
    folder.mkdir()
    processes = [start(IN_TURN) for _ in range(3)]
    assert [each.wait(60) for each in processes] == [0, 0, 0]
    assert list(folder.iterdir()) == []


@pytest.mark.process
def test_a_killed_process_that_nobody_has_reaped_frees_its_lock_and_a_stopped_one_keeps_it(folder, holder):
    mine = lock.Lock(folder / lock.LOCK, folder)
    holder.send_signal(signal.SIGSTOP)
    assert not mine.acquire()
    holder.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    assert Path(f"/proc/{holder.pid}").exists() and mine.acquire()
    mine.release()


def test_a_waiting_process_gets_the_lock_of_a_folder_that_was_removed(folder):
    first, second = (lock.Lock(folder / lock.LOCK, folder) for _ in range(2))
    assert first.acquire() and not second.acquire()
    (folder / lock.LOCK).unlink()
    folder.rmdir()
    assert second.acquire()


def test_a_folder_in_place_of_the_lock_file_is_reported(folder):
    path = folder / lock.LOCK
    path.mkdir(parents=True)
    with pytest.raises(UserError, match=f"{path} must be a file .*; move it away: mv {path} {path}.old"):
        lock.Lock(path, folder).acquire()
