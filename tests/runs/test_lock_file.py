"""Tests of a lock file: when it is free, who may take it over, and what a process does that has lost it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.core.errors import RunError, UserError
from rlhf.core.files import append, guards, write_atomically
from rlhf.runs import lock_file
from rlhf.runs.lock_file import LockFile, locked
from rlhf.runs.owner import Owner, decode, this_process

HOLDER = """
import sys, time
from pathlib import Path
from rlhf.runs.lock_file import LockFile, locked
with locked(LockFile(Path(sys.argv[1]), Path(sys.argv[1]).parent), lambda lock, waited_s: None):
    print("locked", flush=True)
    time.sleep(60)
"""

IN_TURN = """
import sys, time
from pathlib import Path
from rlhf.runs import lock_file
lock_file.STALE_S = 0.3
path = Path(sys.argv[1])
for _ in range(5):
    with lock_file.locked(lock_file.LockFile(path, path.parent), lambda lock, waited_s: None):
        inside = path.with_name("inside")
        inside.open("x").close()  # fails if another process is inside
        time.sleep(0.02)
        inside.unlink()
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock_file, "STALE_S", 0.4)
    monkeypatch.setattr(lock_file, "HALF_WRITTEN_S", 0.4)
    monkeypatch.setattr(lock_file, "SETTLE_S", 0.01)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture
def holder(path):
    """Lock `path` in another process, and return that process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def new(path: Path) -> LockFile:
    return LockFile(path, path.parent)


def owner(**others) -> Owner:
    """Return this process, as the owner of a lock, with other values."""
    return replace(this_process(), token="other", **others)


def acquired(lock: LockFile, within_s: float) -> bool:
    """Return whether attempts succeed within the given seconds."""
    end = time.monotonic() + within_s
    while not (done := lock.acquire()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


def test_a_lock_has_one_owner_and_is_removed_at_its_end(path):
    lock, other = new(path), new(path)
    assert lock.acquire() and not other.acquire()
    assert other.owner == decode(path.read_bytes()) and other.alive
    lock.release()
    assert not path.exists()
    assert other.acquire()


@pytest.mark.process
def test_kill_9_frees_a_lock_also_if_nobody_has_reaped_the_process(path, holder):
    lock = new(path)
    assert not lock.acquire()
    assert lock.owner is not None and lock.owner.process == holder.pid
    holder.send_signal(signal.SIGKILL)
    assert acquired(lock, within_s=5)
    assert Path(f"/proc/{holder.pid}").exists(), "the killed process must still be a zombie in this test"


@pytest.mark.process
def test_a_stopped_process_keeps_its_lock(path, holder):
    holder.send_signal(signal.SIGSTOP)
    lock = new(path)
    assert not acquired(lock, within_s=3 * lock_file.STALE_S)
    assert lock.owner is not None and lock.owner.stop == (
        f"continue it (it is stopped): kill -CONT {holder.pid}"
    )


def test_a_process_of_another_user_that_proc_hides_keeps_its_lock(path, monkeypatch):
    def refused(process: int, signal: int) -> None:
        raise PermissionError

    path.write_bytes(owner(process=2**22 + 1).encode())  # larger than any process id: not in /proc
    monkeypatch.setattr(os, "kill", refused)
    assert not acquired(new(path), within_s=2 * lock_file.STALE_S)


def test_another_process_with_the_id_of_the_owner_does_not_keep_a_lock(path):
    path.write_bytes(owner(start=1).encode())
    assert new(path).acquire()


@pytest.mark.parametrize("written", [0.0, 4e9], ids=["clock behind", "clock ahead"])
def test_the_lock_of_another_host_is_taken_over_if_nobody_touches_it(path, written):
    path.write_bytes(owner(machine="other", host="b").encode())
    os.utime(path, (written, written))
    lock = new(path)
    started = time.monotonic()
    assert acquired(lock, within_s=5)
    assert time.monotonic() - started > lock_file.STALE_S and not lock.alive
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("clock", [0.0, 4e9], ids=["clock behind", "clock ahead"])
def test_the_lock_of_another_host_is_kept_while_its_owner_touches_it(path, clock):
    path.write_bytes(owner(machine="other", host="b").encode())
    lock = new(path)
    for beat in range(12):
        assert not lock.acquire()
        os.utime(path, (clock + beat, clock + beat))
        time.sleep(lock_file.STALE_S / 4)
    assert lock.alive and str(lock.owner).startswith(f"process {os.getpid()} on b, since ")


def test_an_owner_touches_its_lock(path, monkeypatch):
    monkeypatch.setattr(lock_file, "HEARTBEAT_S", 0.02)
    with locked(new(path), lambda lock, waited_s: None):
        os.utime(path, (0, 0))
        end = time.monotonic() + 5
        while path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_container_with_other_process_ids_is_another_host(path):
    kernel, _, _ = this_process().machine.partition("/")
    path.write_bytes(owner(machine=f"{kernel}/1", process=2**22 + 1).encode())
    lock = new(path)
    assert not lock.acquire() and not lock.alive
    assert acquired(lock, within_s=5)


@pytest.mark.parametrize("content", [b"", b'{"process"', b"[]", b"null", b'{"process": "x"}'])
def test_the_file_of_a_process_that_was_killed_while_it_wrote_the_file_is_taken_over(path, content):
    path.write_bytes(content)
    lock = new(path)
    assert not lock.acquire() and lock.owner is None
    assert acquired(lock, within_s=5)


def test_a_requeued_slurm_job_takes_over_the_lock_of_its_earlier_session(path, monkeypatch):
    path.write_bytes(owner(machine="other", slurm_job="17").encode())
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert not new(path).acquire(), "a second process of the same session"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert not new(path).acquire(), "another job"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert new(path).acquire()


def test_an_owner_whose_lock_was_taken_over_writes_nothing_more(path):
    file = path.parent / "metrics.jsonl"
    with locked(new(path), lambda lock, waited_s: None):
        append(file, [{"update": 1}])
        path.write_bytes(owner(process=7, host="b").encode())
        for write in (lambda: append(file, [{}]), lambda: write_atomically(file, "x")):
            with pytest.raises(RunError, match="process 7 on b, since .* took over its lock") as lost:
                write()
            assert "the same command resumes the run" in str(lost.value)
    assert file.read_text() == '{"update": 1}\n'
    assert decode(path.read_bytes()).process == 7, "the lock of the other process stays"
    assert guards == []


def test_a_lock_file_that_somebody_removed_is_written_again(path):
    with locked(lock := new(path), lambda lock, waited_s: None):
        path.unlink()
        append(path.parent / "metrics.jsonl", [{}])
        assert lock.held()
    assert not path.exists()


def test_a_lock_file_that_was_removed_while_its_owner_was_suspended_is_lost(path, monkeypatch):
    with locked(new(path), lambda lock, waited_s: None):
        path.unlink()
        now = lock_file.clock()
        monkeypatch.setattr(lock_file, "clock", lambda: now + 2 * lock_file.STALE_S)
        with pytest.raises(RunError, match="another process took over its lock"):
            append(path.parent / "metrics.jsonl", [{}])


def test_a_write_into_a_folder_that_was_removed_fails_as_without_a_lock(tmp_path):
    path = tmp_path / "run" / ".lock"
    with locked(new(path), lambda lock, waited_s: None):
        path.unlink()
        path.parent.rmdir()
        with pytest.raises(FileNotFoundError):
            append(path.parent / "metrics.jsonl", [{}])


def test_of_two_processes_that_take_over_at_once_the_last_one_has_the_lock(path, monkeypatch):
    path.write_bytes(owner(start=1).encode())
    last = owner(machine="other").encode()
    monkeypatch.setattr(lock_file.time, "sleep", lambda _: path.write_bytes(last))
    assert not new(path).acquire()
    assert path.read_bytes() == last


@pytest.mark.process
def test_processes_that_take_over_the_same_lock_have_it_in_turn(path):
    path.write_bytes(owner(machine="other").encode())
    command = [sys.executable, "-c", IN_TURN, str(path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert list(path.parent.iterdir()) == []


def test_a_waiting_process_gets_the_lock_of_a_folder_that_was_removed(tmp_path):
    path = tmp_path / "new" / ".lock"
    first, second = new(path), new(path)
    assert first.acquire() and not second.acquire()
    threading.Timer(0.1, lambda: (path.unlink(), path.parent.rmdir())).start()
    assert acquired(second, within_s=5)


def test_a_folder_in_place_of_the_lock_file_is_reported(path):
    path.mkdir()
    with pytest.raises(UserError, match=f"{path} must be a file .*; move it away: mv {path} {path}.old"):
        new(path).acquire()
