"""Make a folder once, also if several processes ask for it at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from rlhf.core.console import say
from rlhf.runs.folder import COMPLETE


def made_once(folder: Path, what: str, write: Callable[[Path], object]) -> Path:
    """`folder`, which `write` writes under another name first unless it is there whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            say(f"making {what} (once; kept in {folder})", style="bold")
            scratch = folder.with_name(f".tmp-{folder.name}")
            shutil.rmtree(scratch, ignore_errors=True)
            write(scratch)
            (scratch / COMPLETE).touch()
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
    return folder
