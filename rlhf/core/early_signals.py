"""Signals in the first second of a command, while Python imports the command.

`rlhf.processes.signals` replaces these handlers as soon as the command begins.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from rlhf.core.launched import is_first_rank

EXIT_CODES = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: os.EX_TEMPFAIL,
    signal.SIGUSR1: os.EX_TEMPFAIL,
    signal.SIGUSR2: os.EX_TEMPFAIL,
}
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_STARTED_BY_PYTHON = "multiprocessing"  # in the command line of a process that multiprocessing starts
COMMANDS = ("-m", "rlhf")  # `sys.argv[0]` while `python -m rlhf.<command>` or `rlhf` imports this package


def handle() -> None:
    """Let signals end this process with the exit code of an interrupted command, if it is a command."""
    if os.path.basename(sys.argv[0]) in COMMANDS and _STARTED_BY_PYTHON not in " ".join(sys.orig_argv[:3]):
        for number in EXIT_CODES:
            if signal.getsignal(number) in DEFAULTS:
                signal.signal(number, end)


def default(number: int) -> Any:
    """Return the handler of a signal in a process that Python starts."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def end(number: int, frame: FrameType | None) -> None:
    """End the process; nothing has begun, so there is nothing to clean up."""
    if is_first_rank():
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        os.write(2, f"interrupted by {what} before the command began\n".encode())
    os._exit(EXIT_CODES[signal.Signals(number)])
