"""The one terminal that everything writes to, so that a live display and log lines do not tear each other."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

WIDTH_OF_FILES = 132  # columns, where what is written is no terminal


console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


transcript = logging.getLogger("rlhf.transcript")  # goes to train.log alone


def say(text: str, style: str | None = None) -> None:
    """Print a line in the terminal, and keep it in train.log."""
    console.print(text, style=style, markup=False)
    transcript.info(text)
