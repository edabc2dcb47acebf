"""The terminal: one console for log lines and progress bars, so that they do not overwrite each other."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterable

from rich.console import Console

from rlhf.core.formatting import GAP, lines_of
from rlhf.core.launched import is_first_rank
from rlhf.core.output import discard_closed_output, wrapped
from rlhf.core.secrets import hide

_WIDTH_OF_FILES = 132  # columns of tables if the output is not a terminal
WIDTH_OF_LINES = 100  # most columns of a line of figures

transcript = logging.getLogger("rlhf.transcript")  # its messages go to train.log only
transcript.addHandler(logging.NullHandler())  # without a train.log, an error is not printed a second time


class Terminal(Console):
    """A console that does not end the command if the reader of a pipe (`| head`) has gone."""

    def on_broken_pipe(self) -> None:
        """Discard all later output of this process, and note this in train.log."""
        discard_closed_output()
        transcript.warning("the terminal output was closed; the run continues, and train.log has all lines")


IN_FILE = not sys.stdout.isatty() if sys.stdout else True
console = Terminal(
    highlight=False,
    emoji=False,
    soft_wrap=IN_FILE,  # lines of a file are not wrapped; in a terminal, lines are wrapped between words
    width=_WIDTH_OF_FILES if IN_FILE else None,
    force_jupyter=False,  # a notebook is a file: otherwise each line would be a display of its own
)


def show(text: str, style: str | None = None) -> None:
    """Print lines without secrets; in a terminal, divided between words, so that a long path stays whole."""
    text = hide(text)
    lines = text.splitlines() if IN_FILE else map(wrapped, text.splitlines())
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def say(text: str, style: str | None = None) -> None:
    """Print lines in the terminal and write them to train.log."""
    show(text, style)
    transcript.info(text)


def say_row(name: str, value: str) -> None:
    """Print a row of a summary, wrapped in a terminal, and write it to train.log as one line."""
    line = f"  {name + ':':24} {value}"
    width = 10**6 if IN_FILE else console.width
    for part in textwrap.wrap(line, width, subsequent_indent=" " * 27, break_long_words=False):
        console.print(part, markup=False, soft_wrap=True)  # a long path can be copied
    transcript.info(line)


def say_items(title: str, items: Iterable[str]) -> None:
    """Print a title and items on as few lines as possible, and write them to train.log as one line."""
    parts = [title, *items]
    width = min(console.width, WIDTH_OF_LINES)
    for line in lines_of(parts, width, indent="  "):
        console.print(line, markup=False)
    transcript.info(GAP.join(parts))


def say_loading() -> None:
    """Print that torch and transformers are being imported, which takes seconds, unless they are already."""
    if "transformers" not in sys.modules and is_first_rank():
        console.print("loading torch and transformers ...")
