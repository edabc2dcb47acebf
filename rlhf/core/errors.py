"""Exceptions that end a command with a message and an exit code, without a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from signal import Signals

from rlhf.core.formatting import printable


class UserError(ValueError):
    """Invalid input or configuration. The message gives key, rule, reason, value and remedy.

    Wherever a run raises this error, the command ends with `error: ...`, exit code 2 and no traceback.
    `problems` has one message for each problem. The error that led to it is not shown (`from None`).
    """

    everywhere = False  # True: all ranks raise this error, so only the first rank prints it

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return report(self.problems)


class RunError(RuntimeError):
    """A failure during a run, for example a loss that is not finite. The message gives place and remedy.

    The error ends the command with `error: ...`, exit code 1 and no traceback.
    """

    everywhere = False  # True: all ranks raise this error, so only the first rank prints it


class OutOfMemory(RunError):
    """A GPU has too little memory for another process of the run, such as "generator"."""

    process = ""  # name of the process


class Interrupted(BaseException):
    """A signal stopped the run (`rlhf.processes.signals`), and the run can be resumed.

    The exception ends the command with exit code 75 (`os.EX_TEMPFAIL`) and no traceback. The class does not
    inherit from `Exception`, so that a sweep does not treat the exception as a failed job and continue.

    Args:
        text: the message: progress of the run, and how to resume it.
        received: the signal; None if another rank received it.
    """

    def __init__(self, text: str, received: Signals | None = None) -> None:
        super().__init__(text)
        self.received = received


@contextmanager
def explained(*explanations: Callable[[Exception], Exception | None]) -> Iterator[None]:
    """Raise the explanation of an error of the block instead of the error.

    Args:
        explanations: functions from an error to the error with a remedy, or to None if the function does not
            know the error; the first explanation counts.
    """
    try:
        yield
    except Exception as error:
        for explain in explanations:
            if (explanation := explain(error)) is not None:
                raise explanation from (None if isinstance(explanation, UserError) else error)
        raise


def one_line(error: BaseException) -> str:
    """Return kind and text of an error of the user's code on one line; only the kind if it has no text.

    Control characters are escaped.
    """
    kind, text = type(error).__name__, ""
    with suppress(Exception):  # its own __str__ raises
        text = printable(" ".join(str(error).split()))
    return f"{kind}: {text}" if text else kind


def place_in_code(error: BaseException, *callers: str) -> str:
    """Return, for a message, the innermost line of the user's file in the traceback of an error.

    Args:
        error: an exception of the user's code.
        callers: the files that called the code.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in callers and not frame.filename.startswith("<frozen")
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def report(problems: tuple[str, ...] | list[str]) -> str:
    """Format problems for the terminal: one problem after `error:`, several problems as a list."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    return "\n".join([f"error: {len(problems)} problems", *(f"  - {problem}" for problem in problems)])
