"""Errors that end a command with a message, and settings and commands that a message prints."""

from __future__ import annotations

import json
import re
import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from signal import Signals
from typing import Any

from rlhf.core.formatting import printable

# Exceptions that end a command with a message and an exit code, without a traceback.


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


class CommonError(RunError):
    """A `RunError` that all ranks raise."""

    everywhere = True


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


# Settings and commands that a message prints, written so that they can be pasted into a shell.
#
# The shell reads a command first, then Hydra reads each override in a grammar of its own, in which commas,
# `=`, brackets, quotes, `#` and signs outside of ASCII have a meaning.


_WIDTH = 80  # a longer command is divided into lines
_PLAIN = re.compile(r"(?!\.\d)[A-Za-z_./][\w./@:+-]*", re.ASCII)  # texts that Hydra reads without quotes
_TYPED = re.compile(r"[\w.+-]+|<value>", re.ASCII)  # what a user typed in place of a number, as it is
_NOT_TEXT = re.compile(r"null|true|false|nan|inf", re.I)  # texts that Hydra reads as other values


def setting(key: str, value: Any) -> str:
    """Return `key=value` as it is typed in a shell; `value` may be any text, such as the path of a file."""
    return shlex.quote(override(key, value))


def as_typed(key: str, value: str) -> str:
    """Return `key=value` for a value that a user typed: numbers and lists stay what they are."""
    if inside := re.fullmatch(r"\[(.*)\]", value):
        items = [item.strip(" \"'") for item in inside[1].split(",")]
        return shlex.quote(
            f"{key}=[{','.join(each if _TYPED.fullmatch(each) else as_text(each) for each in items)}]"
        )
    return f"{key}={value}" if _TYPED.fullmatch(value) else setting(key, value)


def override(key: str, value: Any) -> str:
    """Return an override as Hydra reads it, without quotes for the shell."""
    return f"{key}={as_text(value)}"


def as_text(value: Any) -> str:
    """Return a value in Hydra's grammar of overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return value.name
        case int() | float():
            return str(value)
        case list() | tuple():
            return f"[{','.join(map(as_text, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{as_text(each)}' for key, each in value.items())}}}"
    text = str(value)
    if _PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    # Hydra keeps a backslash in quotes, unless it is in front of the quote.
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ("\\" if found[2] else "") + found[2], text)
    return f'"{escaped}"'


def without_escapes(text: str) -> str:
    """Return a text that `as_text` wrote and Hydra read, as OmegaConf reads it: without escapes of `${`."""
    return re.sub(r"((?:\\\\)*)\\\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def python_command(code: str) -> str:
    """Return the command that runs a line of Python; texts in `code` should be written by `literal`."""
    return f"python -c {shlex.quote(code)}"


def literal(text: object) -> str:
    """Return a text as a literal of Python in double quotes, which stay readable in a quoted command."""
    return json.dumps(str(text), ensure_ascii=False)


def lines(*parts: str) -> Iterator[str]:
    """Yield a command as indented lines of at most `_WIDTH` columns, each but the last with a backslash.

    A part that is too long has a line of its own.

    Args:
        parts: the words of the command, quoted for the shell.
    """
    line = f"  {parts[0]}"
    for part in parts[1:]:
        if len(f"{line} {part} \\") > _WIDTH:
            yield f"{line} \\"
            line = f"    {part}"
        else:
            line += f" {part}"
    yield line
