"""Locks of folders: at most one process at a time writes to a run folder, or makes the same artefact.

`rlhf.runs.lock_file` describes how a lock works, and when it is free. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from rlhf.core.console import say
from rlhf.core.errors import UserError, explained
from rlhf.core.files import discard, scratch_of
from rlhf.runs.disk import full_disk
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock_file import STALE_S, LockFile, locked
from rlhf.runs.writable import creating

LOCK = ".lock"  # of a training run
EVALUATION_LOCK = ".lock-evaluation"  # of an evaluation; a run can be evaluated while it trains
WAIT_S = 3.0  # seconds for a process that is just ending
QUIET_S = 1.0  # seconds without a message

# Files and folders without results; logs are in the list because the error is in the terminal as well.
_LOGS = ("train.log", "generator.log", "annotator.log", "wandb", "mlflow", "trackio")
_WITHOUT_RESULTS = (LOCK, EVALUATION_LOCK, "config.yaml", "environment.json", *_LOGS)

Claim = Callable[[Path], AbstractContextManager[object]]  # locks a folder during a block


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
    lock = LockFile(folder / name, folder)
    with ExitStack() as ends:
        ends.callback(_remove_empty, folder)
        with creating(folder), explained(partial(full_disk, RunFolder(folder))):
            ends.enter_context(locked(lock, wait_for if wait else refuse))
        new = all(path.name in (LOCK, EVALUATION_LOCK) for path in folder.iterdir())
        try:
            yield
        except UserError:
            if new and not any(map(_has_results, folder.iterdir())):
                discard(folder)
            raise


waiting_claim: Claim = partial(claimed, wait=True)


@contextmanager
def made_by_one(path: Path) -> Iterator[None]:
    """Lock a file or folder that the block makes; wait for another process that makes it.

    The lock file is `<path>.lock`, so the lock also protects a path that does not exist yet.
    """
    with locked(LockFile(_lock_beside(path), path), wait_for):
        yield


@contextmanager
def written_by_one(path: Path) -> Iterator[None]:
    """Lock a folder that the block writes at its scratch path and then renames.

    Raises:
        UserError: another process writes `path`, or the folder above cannot be created.
    """
    with ExitStack() as ends:
        with creating(path.parent, "output"), explained(partial(full_disk, RunFolder(path.parent))):
            ends.enter_context(locked(LockFile(_lock_beside(path), path, scratch_of(path)), refuse))
        yield


def check_unlocked(folder: Path, *, wait: bool = False, name: str = LOCK) -> None:
    """Check that no other process has locked the folder of a run.

    Args:
        folder: the folder.
        wait: wait until the lock is free.
        name: name of the lock file.

    Raises:
        UserError: another process has locked the folder.
    """
    if (folder / name).exists():
        with locked(LockFile(folder / name, folder), wait_for if wait else refuse):
            pass


def _lock_beside(path: Path) -> Path:
    """Return the lock file of a path that does not have to exist."""
    return path.with_name(f"{path.name}.lock")


def refuse(lock: LockFile, waited_s: float) -> None:
    """Raise UserError if the owner of a lock does not end within `WAIT_S` seconds.

    An owner on another host is refused when it touches its lock file.
    """
    if waited_s < WAIT_S:
        return
    if not lock.alive:
        _say_once(
            lock,
            f"{lock.protects[0]} is locked by {lock.owner or 'another process'}; checking for up to "
            f"{STALE_S:g} seconds whether that process still runs",
        )
        return
    who, stop = (f": {lock.owner}", lock.owner.stop) if lock.owner else ("", "stop that process")
    raise UserError(
        f"an output folder must have one process that writes to it (another process does{who}), got "
        f"{lock.protects[0]}; wait until that process has ended, or {stop}"
    )


def wait_for(lock: LockFile, waited_s: float) -> None:
    """Say once for which process this process waits, if that takes a second or more."""
    if waited_s >= QUIET_S:
        _say_once(lock, f"waiting for {lock.owner or 'another process'}, which writes {lock.protects[0]}")


def _say_once(lock: LockFile, text: str) -> None:
    """Print a line about a lock, unless a line about this lock was printed before."""
    if not lock.announced:
        say(text, style="yellow")
    lock.announced = True


def _remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def _has_results(path: Path) -> bool:
    """Return whether a file or folder of a run contains results, that is more than settings and logs."""
    if path.name in _WITHOUT_RESULTS:
        return False
    return any(map(_has_results, path.iterdir())) if path.is_dir() else path.stat().st_size > 0
