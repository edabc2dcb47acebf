"""Folders that are made once, even if several processes need them at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from rlhf.core.console import say
from rlhf.core.files import whole
from rlhf.runs.folder import COMPLETE


def made_once(folder: Path, what: str, write: Callable[[Path], object]) -> Path:
    """Return `folder` after making it, unless it exists already.

    Args:
        folder: the folder; it is either complete or absent.
        what: name of the content, for the message.
        write: writes the content into the folder that it is called with.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            say(f"making {what} (once; kept in {folder})", style="bold")
            with whole(folder) as scratch:
                write(scratch)
                (scratch / COMPLETE).touch()
    return folder
