"""Locks of folders, and folders in which nothing can be written. This module imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from rlhf.core.errors import RunError, UserError, explained
from rlhf.core.files import SCRATCH, discard
from rlhf.runs.folder import RunFolder
from rlhf.terminal.console import say

# Whether files can be created in a folder that may not exist yet.


def unwritable(folder: Path) -> str | None:
    """Return the reason why nothing can be created in `folder`, which need not exist; or None.

    The function creates and removes a folder, because permissions alone are not reliable on every file
    system.
    """
    existing = nearest(folder)
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folder.lstat()  # fails otherwise if no folder can have this path: a name is too long
        if not existing.is_dir():
            return f"{existing} is not a folder"
        os.rmdir(tempfile.mkdtemp(prefix=SCRATCH, dir=existing))
    except OSError as error:
        return f"{str(error.strerror).lower()}: {existing}"
    return None


def nearest(folder: Path) -> Path:
    """Return `folder` if it exists, else the nearest folder or file above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


@contextmanager
def creating(folder: Path, key: str = "output_dir") -> Iterator[None]:
    """Raise UserError instead of OSError if the block fails because `folder` cannot be created.

    Args:
        folder: the folder that the block creates.
        key: the config key that sets the folder, for the message.
    """
    try:
        yield
    except OSError:
        if (reason := unwritable(folder)) is None:
            raise
        raise UserError(cannot_write(key, folder, reason)) from None


def cannot_write(key: str, folder: Path, reason: str) -> str:
    """Return the message for the folder of a config key in which no files can be created."""
    return f"{key} must be a folder that can be written ({reason}), got {folder}; set {key}=<folder>"


def deleted_folder(folder: Path, error: Exception) -> RunError | None:
    """Explain an error of a run whose folder does not exist any more."""
    if isinstance(error, (UserError, RunError)) or folder.is_dir():
        return None
    return RunError(
        f"the run folder {folder} was deleted or moved during the run ({type(error).__name__}: "
        f"{error}); the same command starts again"
    )


def unusable_file(folder: Path, error: Exception) -> UserError | RunError | None:
    """Explain an OSError of a cache that cannot be written, or of a file in the run folder.

    A file of the run cannot be read or written for example because a folder replaced the file.
    """
    if not isinstance(error, OSError):
        return None
    named = error.filename is not None and not isinstance(error.filename, int)
    if named and folder.absolute() in (file := Path(os.fsdecode(error.filename)).absolute()).parents:
        return RunError(
            f"cannot read or write {file}: {error.strerror}; when this is repaired, the same command "
            "resumes the run from its last checkpoint"
        )
    if error.errno not in (_REFUSED if named else (errno.ENOENT,)):
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HOME") or default).expanduser()
    if named and (reason := unwritable(cache)) is not None:
        return UserError(
            "HF_HOME must be a folder that can be written (models and data sets are cached there; "
            f"{reason}), got {cache}; run: export HF_HOME=<folder>"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return UserError(
            "TMPDIR must be a folder that can be written (libraries create temporary files), got "
            f"{os.environ.get('TMPDIR')}; run: export TMPDIR=<folder>"
        )
    return None


# Detection and error messages of a full disk.


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full, a quota is used up, or `ulimit -f`
_PROBE_BYTES = 2**16


def full(error: BaseException, folder: Path) -> str | None:
    """Return the system's error message if a write into `folder` failed because the disk is full; else None.

    Libraries that write files raise their own errors. safetensors frees the space and names the error number
    in its message. torch leaves the disk full and names no error number in its message, so this function
    tries a small write.
    """
    if isinstance(error, OSError):
        number = error.errno
    else:
        named = (each for each in _FULL if f"os error {each}" in str(error))
        number = next(named, None)
        try:
            if number is None:
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(_PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as problem:
            number = problem.errno
    return os.strerror(number) if number in _FULL else None


def space(folder: Path) -> str:
    """Return the total size of the files below `folder`, formatted with its unit."""
    return mib(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


def free(folder: Path) -> str:
    """Return the free space on the disk of `folder`, formatted with its unit."""
    return mib(shutil.disk_usage(folder).free)


def mib(count: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def full_disk(folder: RunFolder, error: Exception) -> RunError | None:
    """Explain an OSError of a full disk of the run's folder."""
    if isinstance(error, OSError) and (why := full(error, folder.path)):
        return no_room(folder, error.filename or "files of the run", why)
    return None


def no_room(folder: RunFolder, what: object, why: str) -> RunError:
    """Return the error for a disk without space for `what`; `why` is the system's error message."""
    return RunError(
        f"cannot write {what}: {why} ({free(folder.path)} free in {folder.path}); last checkpoint: "
        f"{folder.last_checkpoint() or 'none'}; free some space, then the same command resumes the run"
    )


# Locks of folders: at most one process at a time writes to a run folder, or makes the same artefact.
#
# A lock is a lock of the kernel (flock) on a file that names its holder. The kernel ends the lock with the
# process, also after `kill -9`; a process that is only stopped keeps its lock. A forked process does not
# inherit the lock, because it can outlive the holder, like the workers of a process pool. No torch is
# imported.


LOCK = ".lock"  # of a training run
EVALUATION_LOCK = ".lock-evaluation"  # of an evaluation; a run can be evaluated while it trains
_WAIT_S = 3.0  # seconds for a process that is just ending
_QUIET_S = 1.0  # seconds without a message
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                self.holder, self.stop = (file.read().splitlines() + [self.holder, self.stop])[:2]
            return False
        except OSError as error:
            say(f"{self.path.parent} has no locks ({error}): start one run in it only", style="yellow")
        with suppress(FileNotFoundError):  # otherwise its last holder has just removed the file
            if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                pid, host, job = os.getpid(), socket.gethostname(), os.environ.get("SLURM_JOB_ID")
                where = f"process {pid} on {host}" + (f" (SLURM job {job})" if job else "")
                stop = f"stop its job: scancel {job}" if job else f"stop it: kill {pid}"
                file.truncate(0)
                file.write(f"{where}, since {datetime.now().isoformat(' ', 'seconds')}\n{stop}")
                file.flush()
                self.file = file
                _held.add(file)
                return True
        file.close()
        return False

    def release(self) -> None:
        """End the lock, if this process has it."""
        if self.file is not None:
            self.path.unlink(missing_ok=True)
            _held.discard(self.file)
            self.file.close()
            self.file = None


@contextmanager
def locked(path: Path, protects: Path, wait: bool = False, key: str = "output_dir") -> Iterator[None]:
    """Hold a lock during the block; the folder of the lock file is created if it does not exist.

    Args:
        path: the lock file.
        protects: the path that the lock protects, for messages.
        wait: wait as long as another process has the lock; False: `_WAIT_S` seconds.
        key: the config key that sets the folder of the lock file, for messages.

    Raises:
        UserError: another process has the lock, or the folder cannot be created.
        RunError: the disk is full.
    """
    lock, started, said = Lock(path, protects), time.monotonic(), False
    with creating(path.parent, key), explained(partial(full_disk, RunFolder(path.parent))):
        while not lock.acquire():
            waited_s = time.monotonic() - started
            if not wait and waited_s >= _WAIT_S:
                raise UserError(
                    "an output folder must have one process that writes to it (another process does: "
                    f"{lock.holder}), got {protects}; wait until that process has ended, or {lock.stop}"
                )
            if wait and waited_s >= _QUIET_S and not said:
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
        UserError, RunError: see `locked`.
    """
    try:
        with locked(folder / name, folder, wait):
            new = all(path.name in (LOCK, EVALUATION_LOCK) for path in folder.iterdir())
            try:
                yield
            except UserError:
                if new and not any(map(_has_results, folder.iterdir())):
                    discard(folder)
                raise
    finally:
        with suppress(OSError):
            folder.rmdir()  # only if it is empty


waiting_claim: Claim = partial(claimed, wait=True)


def made_by_one(path: Path) -> AbstractContextManager[None]:
    """Lock a path that the block makes and that may not exist yet; wait for another process that makes it."""
    return locked(path.with_name(f"{path.name}.lock"), path, wait=True, key="cache_dir")


def written_by_one(path: Path) -> AbstractContextManager[None]:
    """Lock a folder that the block writes at its scratch path and then renames.

    Raises:
        UserError, RunError: see `locked`.
    """
    return locked(path.with_name(f"{path.name}.lock"), path, key="output")


def check_unlocked(folder: Path, *, wait: bool = False, name: str = LOCK) -> None:
    """Check that no other process has locked the folder of a run, or wait until none has.

    Raises:
        UserError: another process has locked the folder.
    """
    if (folder / name).exists():
        with locked(folder / name, folder, wait):
            pass


def _has_results(path: Path) -> bool:
    """Return whether a file or folder of a run contains results, that is more than settings and logs."""
    if path.name in _WITHOUT_RESULTS:
        return False
    return any(map(_has_results, path.iterdir())) if path.is_dir() else path.stat().st_size > 0
