"""Locks of folders: at most one process at a time writes to a run folder, or makes the same artefact.

A lock is a lock of the kernel (flock) on a file that names its holder. The kernel ends the lock with the
process, also after `kill -9`; a process that is only stopped keeps its lock. A forked process does not
inherit the lock, because it can outlive the holder, like the workers of a process pool. No torch is imported.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from rlhf.core.console import say
from rlhf.core.errors import UserError, explained
from rlhf.core.files import discard
from rlhf.runs.disk import full_disk
from rlhf.runs.folder import RunFolder
from rlhf.runs.writable import creating

LOCK = ".lock"  # of a training run
EVALUATION_LOCK = ".lock-evaluation"  # of an evaluation; a run can be evaluated while it trains
WAIT_S = 3.0  # seconds for a process that is just ending
QUIET_S = 1.0  # seconds without a message
_POLL_S = 0.1

# Files and folders without results; logs are in the list because the error is in the terminal as well.
_LOGS = ("train.log", "generator.log", "annotator.log", "wandb", "mlflow", "trackio")
_WITHOUT_RESULTS = (LOCK, EVALUATION_LOCK, "config.yaml", "environment.json", *_LOGS)

_held: set[TextIO] = set()  # lock files that this process has locked
os.register_at_fork(after_in_child=lambda: [file.close() for file in _held])

Claim = Callable[[Path], AbstractContextManager[object]]  # locks a folder during a block


class Lock:
    """A lock file, which names its holder: `protects` is the path that messages name."""

    def __init__(self, path: Path, protects: Path) -> None:
        self.path, self.protects = path.absolute(), protects.absolute()
        self.file: TextIO | None = None  # open while this process has the lock
        self.holder, self.stop = "another process", "stop that process"

    def acquire(self) -> bool:
        """Try to get the lock once, and return whether this process now has it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
        except FileNotFoundError:  # its holder has removed its new folder
            return False
        except IsADirectoryError:
            old = shlex.quote(str(self.path))
            rule = f"{self.path} must be a file (it locks the folder), got a folder"
            raise UserError(f"{rule}; move it away: mv {old} {old}.old") from None
        with ExitStack() as ends:
            ends.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                self.holder, self.stop = (file.read().splitlines() + [self.holder, self.stop])[:2]
                return False
            except OSError as error:
                say(f"{self.path.parent} has no locks ({error}): start one run in it only", style="yellow")
            with suppress(FileNotFoundError):  # otherwise its last holder has just removed the file
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    file.truncate(0)
                    file.write("\n".join(_this_process()))
                    file.flush()
                    ends.pop_all()
                    self.file = file
                    _held.add(file)
        return self.file is not None

    def release(self) -> None:
        """End the lock, if this process has it."""
        if self.file is not None:
            self.path.unlink(missing_ok=True)
            _held.discard(self.file)
            self.file.close()
            self.file = None


def _this_process() -> tuple[str, str]:
    """Return the description of this process, and how to stop it."""
    pid, host, job = os.getpid(), socket.gethostname(), os.environ.get("SLURM_JOB_ID")
    where = f"process {pid} on {host}" + (f" (SLURM job {job})" if job else "")
    stop = f"stop its job: scancel {job}" if job else f"stop it: kill {pid}"
    return f"{where}, since {datetime.now().isoformat(' ', 'seconds')}", stop


@contextmanager
def locked(path: Path, protects: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock during the block; `wait`: as long as another process has it, else `WAIT_S` seconds.

    Raises:
        UserError: another process has the lock.
    """
    lock, started, said = Lock(path, protects), time.monotonic(), False
    while not lock.acquire():
        waited_s = time.monotonic() - started
        if not wait and waited_s >= WAIT_S:
            raise UserError(
                "an output folder must have one process that writes to it (another process does: "
                f"{lock.holder}), got {protects}; wait until that process has ended, or {lock.stop}"
            )
        if wait and waited_s >= QUIET_S and not said:
            said = True
            say(f"waiting for {lock.holder}, which writes {protects}", style="yellow")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed(folder: Path, *, wait: bool = False, name: str = LOCK) -> Iterator[None]:
    """Create the folder of a run if it does not exist, and lock it during the block.

    If the block leaves the folder empty, the folder is removed; also if it was new, and the block raises
    UserError and leaves no results in it.

    Args:
        folder: the folder.
        wait: wait for another process that has locked the folder.
        name: name of the lock file.

    Raises:
        UserError: another process has locked the folder, or the folder cannot be created.
        RunError: the disk is full.
    """
    with ExitStack() as ends:
        ends.callback(_remove_empty, folder)
        with creating(folder), explained(partial(full_disk, RunFolder(folder))):
            ends.enter_context(locked(folder / name, folder, wait))
        new = all(path.name in (LOCK, EVALUATION_LOCK) for path in folder.iterdir())
        try:
            yield
        except UserError:
            if new and not any(map(_has_results, folder.iterdir())):
                discard(folder)
            raise


waiting_claim: Claim = partial(claimed, wait=True)


def made_by_one(path: Path) -> AbstractContextManager[None]:
    """Lock a path that the block makes and that may not exist yet; wait for another process that makes it."""
    return locked(_beside(path), path, wait=True)


@contextmanager
def written_by_one(path: Path) -> Iterator[None]:
    """Lock a folder that the block writes at its scratch path and then renames.

    Raises:
        UserError: another process writes `path`, or the folder above cannot be created.
    """
    with ExitStack() as ends:
        with creating(path.parent, "output"), explained(partial(full_disk, RunFolder(path.parent))):
            ends.enter_context(locked(_beside(path), path))
        yield


def check_unlocked(folder: Path, *, wait: bool = False, name: str = LOCK) -> None:
    """Check that no other process has locked the folder of a run, or wait until none has.

    Raises:
        UserError: another process has locked the folder.
    """
    if (folder / name).exists():
        with locked(folder / name, folder, wait):
            pass


def _beside(path: Path) -> Path:
    """Return the lock file of a path that does not have to exist."""
    return path.with_name(f"{path.name}.lock")


def _remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def _has_results(path: Path) -> bool:
    """Return whether a file or folder of a run contains results, that is more than settings and logs."""
    if path.name in _WITHOUT_RESULTS:
        return False
    return any(map(_has_results, path.iterdir())) if path.is_dir() else path.stat().st_size > 0
