"""Settings and commands that a message prints, written so that they can be pasted into a shell.

The shell reads a command first, then Hydra reads each override in a grammar of its own, in which commas, `=`,
brackets, quotes, `#` and signs outside of ASCII have a meaning. This module imports no torch and no Hydra.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from enum import Enum
from typing import Any

WIDTH = 80  # a longer command is divided into lines
PLAIN = re.compile(r"(?!\.\d)[A-Za-z_./][\w./@:+-]*", re.ASCII)  # texts that Hydra reads without quotes
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
    if PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
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
    """Yield a command as indented lines of at most `WIDTH` columns, each but the last with a backslash.

    A part that is too long has a line of its own.

    Args:
        parts: the words of the command, quoted for the shell.
    """
    line = f"  {parts[0]}"
    for part in parts[1:]:
        if len(f"{line} {part} \\") > WIDTH:
            yield f"{line} \\"
            line = f"    {part}"
        else:
            line += f" {part}"
    yield line
