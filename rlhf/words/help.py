"""The texts of `--help`: an overview, options and keys of a group, all keys. This module imports no torch."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from typing import Any, get_args

from rlhf.config.schema import Choice, fact, plain, section_class
from rlhf.core.errors import UserError
from rlhf.words.catalogue import all_keys, conf_dir, declared_keys, groups, options
from rlhf.words.mistakes import suggestion

WIDTH = 80
LONG = 30  # groups with more options are named, not listed
_OVERVIEW = (files("rlhf.words") / "help.txt").read_text(encoding="utf-8")
_GROUP = re.compile(r"^  \{(\w+)\} (.*)\n", re.M)
GROUPS = dict(_GROUP.findall(_OVERVIEW))  # group -> meaning


def help_text(topics: Sequence[str]) -> str:
    """Return the text of `--help`, or of `--help <topic>` for each topic.

    A topic is a group, a section, a key, the end of a key, or `keys`.

    Raises:
        UserError: a topic does not exist.
    """
    if not topics:  # help.txt with the options of each group
        rows = list(_GROUP.finditer(_OVERVIEW))
        lines = "".join(f"{line}\n" for group in groups() for line in _group_lines(group))
        return f"{_OVERVIEW[: rows[0].start()]}{lines}{_OVERVIEW[rows[-1].end() :]}".rstrip("\n")
    keys = sorted(all_keys(), key=lambda key: "." in key)  # those of the root first
    sections = [each.key for each in declared_keys() if "." not in each.key and section_class(each.hint)]
    parts: list[str] = []
    for topic in topics:
        found = keys if topic == "keys" else [key for key in keys if f"{key}.".startswith(f"{topic}.")]
        if topic in groups():
            parts.append(f"{topic}=<option>    {GROUPS.get(topic, '')}".rstrip())
            parts += [line for name, means in options(topic).items() for line in row(name, means, 24)]
        if topic == "keys":
            parts.append("Keys: <key>=<value>. The value in brackets is the default of the first option.")
        elif topic in sections:
            parts.append(f"Keys of {topic}: {topic}.<key>=<value>")
        elif topic in groups():
            found = []
        elif not (found := found or [key for key in keys if key.endswith(f".{topic}")]):
            group = next((group for group in groups() if topic.lower() in options(group)), None)
            known = list(dict.fromkeys([*groups(), *sections]))
            guess = suggestion(topic, ["keys", *known, *keys], "did you mean --help {}?")
            raise UserError(
                f"--help must be followed by keys, a group ({', '.join(known)}) or a key, got {topic}; "
                + (f"see --help {group}" if group else guess or "see --help")
            )
        parts += [line for key in found for line in row(key, _line(key), 34)]
    return "\n".join(parts)


def _group_lines(group: str) -> Iterator[str]:
    """Yield the lines of a group: its meaning, and its options. Of a long group, only options of the user."""
    names = list(options(group))
    if len(names) > LONG:
        shipped = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
        own = [name for name in names if name not in shipped]
        names = own or [f"{len(names)} options: --help {group}"]
    yield from row(group, GROUPS.get(group, ""), 12)
    yield from row("", "  ".join(names), 12)


def _line(key: str) -> str:
    """Return the meaning of a key with its default."""
    declared = all_keys()[key]
    default = next(each.default for each in fields(declared.section) if each.name == declared.name)
    means = "; ".join(part.rstrip(".") for part in meaning(declared.section, declared.name, declared.hint))
    return means.replace("`", "") + ("" if default in (MISSING, "???") else f" [{plain(default)}]")


def meaning(owner: type, name: str, hint: Any) -> list[str]:
    """Return the meaning of a key and of its choices, as one text each.

    Args:
        owner: the section class that declares the key.
        name: the field of the key.
        hint: the type of the field.
    """
    text = fact(owner, name, "means")
    parts = [text] if text else []
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, Choice):
            if not parts:
                parts.append(summary(each))
            parts += [f"`{choice.value}`: {choice.means}" for choice in each if choice.means]
    return parts


def summary(cls: type) -> str:
    """Return the first paragraph of the docstring of a class."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def row(left: str, right: str, width: int) -> list[str]:
    """Return the lines of a row with two columns; the second column is wrapped at 80 columns.

    Args:
        left: the first column. If it does not fit, the second column begins in the next line.
        right: the second column.
        width: width of the first column.
    """
    first, margin, fits = f"  {left:{width}}", " " * (2 + width), len(left) < width
    start = first if fits else margin
    lines = textwrap.wrap(
        right, WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
    )
    return lines if fits and lines else [first.rstrip(), *lines]
