"""Detection and error messages of a full disk. This module imports no torch."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.errors import RunError
from rlhf.core.files import SCRATCH

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full, a quota is used up, or `ulimit -f`
_PROBE_BYTES = 2**16


def full(error: BaseException, folder: Path) -> str | None:
    """Return the system's error message if a write into `folder` failed because the disk is full; else None.

    Libraries that write files raise their own errors. safetensors frees the space and names the error number
    in its message. torch leaves the disk full and names no error number in its message, so this function
    tries a small write.
    """
    number = error.errno if isinstance(error, OSError) else _number_in_text(error) or _number_of_probe(folder)
    return os.strerror(number) if number in _FULL else None


def _number_in_text(error: BaseException) -> int | None:
    """Return the error number of a full disk if the error message contains it."""
    return next((number for number in _FULL if f"os error {number}" in str(error)), None)


def _number_of_probe(folder: Path) -> int | None:
    """Return the error number of a small test write into `folder`; None if the write succeeds."""
    probe = folder / f"{SCRATCH}probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        return problem.errno
    finally:
        probe.unlink(missing_ok=True)
    return None


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
