"""The lock of a run folder: at most one run writes to a folder at a time.

The lock is a lock of the kernel (flock) on the file `.lock` in the folder, so it ends with its process, also
after `kill -9`. The content of the file names the process, for messages. On a file system without locks, such
as some parallel ones, folders are not locked. This module imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from rlhf.core.errors import UserError
from rlhf.core.files import discard
from rlhf.runs.writable import creating

LOCK = ".lock"
WAIT_S = 3.0  # seconds for a process that is just ending
POLL_S = 0.1

# Files and folders without results; logs are in the list because the error is in the terminal as well.
LOGS = ("train.log", "generator.log", "annotator.log", "wandb")
WITHOUT_RESULTS = (LOCK, "config.yaml", "environment.json", *LOGS)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create the folder of a run if it does not exist, and lock it during the block.

    If the block raises UserError in a folder that was new, and the folder contains no results, the folder is
    removed.

    Raises:
        UserError: another process has locked the folder, or the folder cannot be created.
    """
    with creating(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire(folder)
    new = all(path.name == LOCK for path in folder.iterdir())
    try:
        yield
    except UserError:
        if new and not any(has_results(path) for path in folder.iterdir()):
            discard(folder)
        raise
    finally:
        release(lock, folder)


def refuse_locked(folder: Path) -> None:
    """Raise UserError if another process has locked the folder of a run."""
    if (folder / LOCK).is_file():
        release(acquire(folder), folder)


def acquire(folder: Path) -> IO[str] | None:
    """Lock a folder, and return the open lock file; None if the file system has no locks.

    Raises:
        UserError: another process has locked the folder.
    """
    end = time.monotonic() + WAIT_S
    while True:
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = read_owner(file)
            file.close()
            if is_earlier_session(owner):
                return None
            if time.monotonic() > end:
                raise UserError(in_use(folder, owner)) from None
            time.sleep(POLL_S)
            continue
        except OSError:
            file.close()
            return None
        if is_at(file, folder / LOCK):
            with suppress(OSError):  # the disk is full: the lock does not need the content
                file.truncate(0)
                file.write(json.dumps(this_process()))
                file.flush()
            return file
        file.close()  # the process that had the lock has removed the file


def release(lock: IO[str] | None, folder: Path) -> None:
    """Remove the lock file that `acquire` returned, and end the lock."""
    if lock is None:
        return
    if is_at(lock, folder / LOCK):
        (folder / LOCK).unlink()
    lock.close()


def is_at(file: IO[str], path: Path) -> bool:
    """Return whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def this_process() -> dict[str, str | int | None]:
    """Return the description of this process that the lock file contains."""
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def read_owner(file: IO[str]) -> dict[str, str | int | None]:
    """Return the description of the process that has locked the file; empty if it is not written yet."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def is_earlier_session(owner: dict[str, str | int | None]) -> bool:
    """Return whether the lock belongs to an earlier session of this SLURM job, before SLURM requeued it.

    That session has ended. A file server may keep the lock of a host that failed.
    """
    requeued, job = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0, os.environ.get("SLURM_JOB_ID")
    return requeued and job is not None and owner.get("slurm_job") == job


def in_use(folder: Path, owner: dict[str, str | int | None]) -> str:
    """Return the message for a folder that another process has locked."""
    who, stop = "", "stop that process"
    if owner:
        who = f": process {owner.get('process')} on {owner.get('host')}, since {owner.get('since')}"
        if owner.get("host") == socket.gethostname():
            stop = f"stop it: kill {owner.get('process')}"
    return (
        f"a run folder must have one process that writes to it (another process uses it{who}), got {folder}; "
        f"wait until that process has ended, or {stop}"
    )


def has_results(path: Path) -> bool:
    """Return whether a file or folder of a run contains results, that is more than settings and logs."""
    if path.name in WITHOUT_RESULTS:
        return False
    return any(map(has_results, path.iterdir())) if path.is_dir() else path.stat().st_size > 0
