"""Folders that are made once, even if several processes need them at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf.core.console import say
from rlhf.core.files import whole
from rlhf.runs.folder import COMPLETE
from rlhf.runs.lock import made_by_one


def made_once(folder: Path, what: str | None, write: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, make it first.

    Args:
        folder: the folder; it is either complete or absent.
        what: name of the content, for the message; None: no message.
        write: function that writes the content into the folder in its argument.
    """
    if (folder / COMPLETE).exists():
        return folder
    with made_by_one(folder):
        if not (folder / COMPLETE).exists():
            if what is not None:
                say(f"making {what} (once; kept in {folder})", style="bold")
            with whole(folder) as scratch:
                write(scratch)
                (scratch / COMPLETE).touch()
    return folder
