"""Whether files can be created in a folder that may not exist yet. This module imports no torch."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.core.errors import RunError, UserError
from rlhf.core.files import SCRATCH


def unwritable(folder: Path) -> str | None:
    """Return the reason why nothing can be created in `folder`, which need not exist; or None.

    The function creates and removes a folder, because permissions alone are not reliable on every file
    system.
    """
    if (reason := invalid(folder)) is not None:
        return reason
    existing = nearest(folder)
    if not existing.is_dir():
        return f"{existing} is not a folder"
    probe = existing / f"{SCRATCH}probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except FileExistsError:  # another thread of this process
        return None
    except OSError as error:
        return f"{str(error.strerror).lower()}: {existing}"
    return None


def invalid(folder: Path) -> str | None:
    """Return why no folder can have this path, for example because a name is too long; or None."""
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        return str(error.strerror).lower()
    return None


def nearest(folder: Path) -> Path:
    """Return `folder` if it exists, else the nearest folder or file above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


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
    if problem := _unusable_cache(error, folder):
        return UserError(problem)
    if file := _file_in(folder, error):
        return RunError(
            f"cannot read or write {file}: {error.strerror}; when this is repaired, the same command "
            "resumes the run from its last checkpoint"
        )
    return None


def _file_in(folder: Path, error: OSError) -> Path | None:
    """Return the file that an error names if it is in `folder`, else None."""
    if error.filename is None or isinstance(error.filename, int):
        return None
    file = Path(os.fsdecode(error.filename)).absolute()
    return file if folder.absolute() in file.parents else None


def _unusable_cache(error: OSError, folder: Path) -> str | None:
    """Return the message for an error of a library that writes to a cache or a temporary folder; or None.

    Args:
        error: the error.
        folder: the run folder.
    """
    if error.errno == errno.ENOENT and error.filename is None:
        return _temporary_folder_problem()
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
        return None
    if error.filename is None or _file_in(folder, error) is not None:
        return None
    return _cache_problem() or _temporary_folder_problem()


def _cache_problem() -> str | None:
    """Return the message for a cache folder of Hugging Face in which no files can be created; or None."""
    cache = _hugging_face_cache()
    if (reason := unwritable(cache)) is None:
        return None
    return (
        f"HF_HOME must be a folder that can be written (models and data sets are cached there; {reason}), "
        f"got {cache}; run: export HF_HOME=<folder>"
    )


def _temporary_folder_problem() -> str | None:
    """Return the message for a machine without a folder for temporary files; or None."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return (
            "TMPDIR must be a folder that can be written (libraries create temporary files), got "
            f"{os.environ.get('TMPDIR')}; run: export TMPDIR=<folder>"
        )
    return None


def _hugging_face_cache() -> Path:
    """Return the folder in which the libraries of Hugging Face cache models and data sets."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser()
