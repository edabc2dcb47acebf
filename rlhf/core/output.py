"""stdout and stderr: output that cannot be shown, written or read does not end a command."""

from __future__ import annotations

import errno
import io
import os
import select
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from rlhf.core.formatting import printable
from rlhf.core.secrets import hide

if TYPE_CHECKING:
    from typing_extensions import Buffer


class LossyFile(io.FileIO):
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
        sys.stdout = _lossy(sys.stdout)
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _lossy(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a text stream to the file of `stream` that drops lines while the disk is full."""
    stream.flush()
    raw = LossyFile(stream.fileno(), "w", closefd=False)
    by_line = stream.line_buffering or stream.write_through  # a terminal, or PYTHONUNBUFFERED
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_line)


def print_error(text: str) -> None:
    """Print lines to stderr without secrets, unless the reader of a pipe has gone.

    Control characters, which errors of the user's code may contain, are escaped. In a terminal, lines are
    divided between words.
    """
    text = "\n".join(map(printable, hide(text).split("\n")))
    if sys.stderr.isatty():
        text = "\n".join(map(wrapped, text.splitlines()))
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        discard_closed_output()


def wrapped(line: str) -> str:
    """Return a line, divided between words into lines that fit the terminal, with its indent."""
    indent = line[: len(line) - len(line.lstrip())]
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def discard_closed_output() -> None:
    """Redirect stdout and stderr to the null device if they are pipes whose reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and _reader_has_gone(stream.fileno()):
            os.dup2(null, stream.fileno())
    os.close(null)


def _reader_has_gone(descriptor: int) -> bool:
    """Return whether `descriptor` is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))
