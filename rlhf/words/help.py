"""The texts of `--help`: an overview, options and keys of a group, all keys. This module imports no torch."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from rlhf.config.schema import Choice, fact, plain, section_class
from rlhf.core.errors import UserError
from rlhf.words.catalogue import conf_dir, groups, options, options_of
from rlhf.words.suggestions import suggestion

WIDTH = 80
LONG = 20  # groups with more options are named, not listed
_OVERVIEW = (files("rlhf.words") / "help.txt").read_text(encoding="utf-8")
_GROUP = re.compile(r"^  \{(\w+)\} (.*)\n", re.M)
GROUPS = dict(_GROUP.findall(_OVERVIEW))  # group -> meaning


def help_text(topics: Sequence[str]) -> str:
    """Return the text of `--help`, or of `--help <topic>` for each topic.

    A topic is a group, a section, a key, the end of a key, or `keys`.

    Raises:
        UserError: a topic does not exist.
    """
    if not topics:
        return _overview()
    parts: list[str] = []
    known = ["keys", *groups(), *_key_sections()]
    for topic in topics:
        every = {} if topic in known else all_meanings()
        found = {key: means for key, means in every.items() if f"{key}.".startswith(f"{topic}.")}
        if topic in known:
            parts += _about(topic)
        elif found := found or {key: every[key] for key in every if key.endswith(f".{topic}")}:
            parts += [line for key, means in found.items() for line in row(key, means, 2, 34)]
        else:
            group = next((group for group in groups() if topic.lower() in options(group)), None)
            guess = f"see --help {group}" if group else None
            guess = guess or suggestion(topic, [*known, *every], "did you mean --help {}?")
            rule = (
                f"--help must be followed by keys, a group ({', '.join(dict.fromkeys(known[1:]))}) or a key"
            )
            raise UserError(f"{rule}, got {topic}; {guess or 'see --help'}")
    return "\n".join(parts)


def _overview() -> str:
    """Return the text of `--help` without a topic: help.txt with the options of each group."""
    rows = list(_GROUP.finditer(_OVERVIEW))
    lines = "".join(f"{line}\n" for group in groups() for line in _group_lines(group))
    return f"{_OVERVIEW[: rows[0].start()]}{lines}{_OVERVIEW[rows[-1].end() :]}".rstrip("\n")


def _group_lines(group: str) -> Iterator[str]:
    """Yield the lines of a group: its meaning, and its options. Of a long group, only options of the user."""
    names = list(options(group))
    if len(names) > LONG:
        shipped = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
        own = [name for name in names if name not in shipped]
        names = own or [f"{len(names)} options: --help {group}"]
    yield from row(group, GROUPS.get(group, ""), 2, 12)
    yield from row("", "  ".join(names), 2, 12)


def _about(topic: str) -> Iterator[str]:
    """Yield the lines about a group or a section: the meaning, the options and the keys; or all keys."""
    found = [topic] if topic in _key_sections() else []
    if topic in groups():
        yield f"{topic}=<option>    {GROUPS.get(topic, '')}".rstrip()
        for name, means in options(topic).items():
            yield from row(name, means, 2, 24)
    if found:
        yield f"Keys of {topic}: {topic}.<key>=<value>"
    if topic == "keys":
        yield "Keys: <key>=<value>. The value in brackets is the default of the first option."
        found = ["", *_key_sections()]
    for section in found:
        for key, means in _meanings(section, classes(section)):
            yield from row(key, means, 2, 34)


def all_meanings() -> Mapping[str, str]:
    """Return the meaning of every key."""
    return {
        key: means
        for section in ("", *_key_sections())
        for key, means in _meanings(section, classes(section))
    }


def _meanings(section: str, owners: Sequence[type]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a section, with their meanings, and, except for the root, of the sections below it.

    Args:
        section: the dotted key of the section; "" is the root.
        owners: the classes that declare the keys. A key of several classes is listed once.
    """
    seen = {"name"}
    for cls in owners:
        hints = get_type_hints(cls)
        for field in fields(cls):
            hint = hints[field.name]
            if field.name in seen:
                continue
            seen.add(field.name)
            key = f"{section}.{field.name}" if section else field.name
            if (below := section_class(hint)) is not None:
                if section:
                    yield from _meanings(key, [below])
                continue
            default = None if field.default in (MISSING, "???") else f" [{plain(field.default)}]"
            owner = next(c for c in reversed(cls.__mro__) if field.name in vars(c).get("__annotations__", {}))
            means = "; ".join(part.rstrip(".") for part in meaning(owner, field.name, hint)).replace("`", "")
            yield key, f"{means}{default or ''}"


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


def _key_sections() -> list[str]:
    """Return the names of the sections of the config, such as `schedule`."""
    from rlhf.config.root import Config

    hints = get_type_hints(Config)
    return [field.name for field in fields(Config) if section_class(hints[field.name]) is not None]


def classes(section: str) -> list[type]:
    """Return the classes that declare the keys of a section: the base class, then those of the options."""
    from rlhf.config.root import Config

    if not section:
        return [Config]
    base = section_class(get_type_hints(Config)[section])
    assert base is not None
    return [base, *options_of(base)]


def row(left: str, right: str, indent: int, width: int) -> Iterable[str]:
    """Return the lines of a row with two columns; the second column is wrapped at 80 columns.

    Args:
        left: the first column. If it does not fit, the second column begins in the next line.
        right: the second column.
        indent: spaces before the first column.
        width: width of the first column.
    """
    margin = " " * (indent + width)
    first = f"{'':{indent}}{left:{width}}"
    before = [] if len(first) == len(margin) and (not left or first.endswith(" ")) else [first.rstrip()]
    start = margin if before else first
    wrapped = textwrap.wrap(
        right, WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
    )
    return [*before, *(wrapped or ([] if before else [first.rstrip()]))]
