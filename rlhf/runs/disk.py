"""A disk that is full: how to tell, and how to say it. Imports no torch."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.errors import RunError

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder


FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or what the user may have of it


PROBE_BYTES = 2**16


def full(error: BaseException, folder: Path) -> str | None:
    """Why a write into `folder` failed with `error`, in the system's words, if the disk is full; else None.

    Libraries that write by themselves have words of their own: safetensors clears up and gives the number,
    torch leaves the disk full and speaks of positions, so that one more write tells.
    """
    number = error.errno if isinstance(error, OSError) else written(error) or probed(folder)
    return os.strerror(number) if number in FULL else None


def written(error: BaseException) -> int | None:
    """The number of a full disk that an error's text gives."""
    return next((number for number in FULL if f"os error {number}" in str(error)), None)


def probed(folder: Path) -> int | None:
    """The number of the error that a small write into `folder` meets."""
    probe = folder / f".tmp-probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        return problem.errno
    finally:
        probe.unlink(missing_ok=True)
    return None


def space(folder: Path) -> str:
    """What the files below `folder` take, in words."""
    return mib(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


def free(folder: Path) -> str:
    """The space that is left where `folder` is, in words."""
    return mib(shutil.disk_usage(folder).free)


def mib(count: int) -> str:
    """A number of bytes, in words."""
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def explained(folder: RunFolder) -> Iterator[None]:
    """Around what writes into a run's folder: raise RunError where its disk is full."""
    try:
        yield
    except OSError as error:
        if why := full(error, folder.path):
            raise no_room(folder, error.filename or "files of the run", why) from error
        raise


def no_room(folder: RunFolder, what: object, why: str) -> RunError:
    """What to tell of a disk without room for `what`."""
    last = folder.last_checkpoint() or "not there yet: none was written"
    return RunError(
        f"{what} must be written, and there is no room for it ({free(folder.path)} free in {folder.path}), "
        f"got: {why}; the last checkpoint is {last}; free some space, then the same command goes on"
    )
