"""The terminal: one console for all lines and bars, and output that cannot be written."""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf.core.formatting import GAP, hide, lines_of, printable
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from typing_extensions import Buffer


# stdout and stderr: output that cannot be shown, written or read does not end a command.


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write because the disk is full."""

    def write(self, data: Buffer, /) -> int:
        """Write bytes, and return their number; nothing is written if the disk is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(memoryview(data))


def prepare_output() -> None:
    """Keep stdout and stderr from ending the command.

    Every command calls this function first. A character that the encoding lacks is replaced, instead of
    raising UnicodeEncodeError. If stdout is a file and the disk is full, lines are dropped, instead of
    raising OSError.
    """
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        out = sys.stdout
        out.flush()
        raw = io.BufferedWriter(_LossyFile(out.fileno(), "w", closefd=False))
        by_line = out.line_buffering or out.write_through  # a terminal, or PYTHONUNBUFFERED
        sys.stdout = io.TextIOWrapper(raw, out.encoding, out.errors, line_buffering=by_line)
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def print_error(text: str) -> None:
    """Print lines to stderr without secrets, unless the reader of a pipe has gone.

    Control characters, which errors of the user's code may contain, are escaped. In a terminal, lines are
    divided between words.
    """
    text = "\n".join(map(printable, hide(text).split("\n")))
    if sys.stderr.isatty():
        text = "\n".join(map(_wrapped, text.splitlines()))
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard_closed_output()


def _wrapped(line: str) -> str:
    """Return a line, divided between words into lines that fit the terminal, with its indent."""
    indent = line[: len(line) - len(line.lstrip())]
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _discard_closed_output() -> None:
    """Redirect stdout and stderr to the null device if they are pipes whose reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if any(events & select.POLLERR for _, events in poll.poll(0)):  # a pipe without a reader
            os.dup2(null, stream.fileno())
    os.close(null)


# The terminal: one console for log lines and progress bars, so that they do not overwrite each other.


_WIDTH_OF_FILES = 132  # columns of tables if the output is not a terminal
WIDTH_OF_LINES = 100  # most columns of a line of figures

transcript = logging.getLogger("rlhf.transcript")  # its messages go to train.log only
transcript.addHandler(logging.NullHandler())  # without a train.log, an error is not printed a second time


class Terminal(Console):
    """A console that does not end the command if the reader of a pipe (`| head`) has gone."""

    def on_broken_pipe(self) -> None:
        """Discard all later output of this process, and note this in train.log."""
        _discard_closed_output()
        transcript.warning("the terminal output was closed; the run continues, and train.log has all lines")


_IN_FILE = not sys.stdout.isatty() if sys.stdout else True
console = Terminal(
    highlight=False,
    emoji=False,
    soft_wrap=_IN_FILE,  # lines of a file are not wrapped; in a terminal, lines are wrapped between words
    width=_WIDTH_OF_FILES if _IN_FILE else None,
    force_jupyter=False,  # a notebook is a file: otherwise each line would be a display of its own
)


def show(text: str, style: str | None = None) -> None:
    """Print lines without secrets; in a terminal, divided between words, so that a long path stays whole."""
    text = hide(text)
    lines = text.splitlines() if _IN_FILE else map(_wrapped, text.splitlines())
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def say(text: str, style: str | None = None) -> None:
    """Print lines in the terminal and write them to train.log."""
    show(text, style)
    transcript.info(text)


def say_row(name: str, value: str) -> None:
    """Print a row of a summary, wrapped in a terminal, and write it to train.log as one line."""
    line = f"  {name + ':':24} {value}"
    width = 10**6 if _IN_FILE else console.width
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
