"""Names of settings in TRL, OpenRLHF and verl, and the key of this project for each.

The table serves the suggestions of error messages and docs/coming_from.md. The names are those of TRL 1.16,
OpenRLHF 0.11 and verl 0.9, and names of earlier versions. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.resources import files

from rlhf.core.pasting import as_typed

PROJECTS = ("TRL", "OpenRLHF", "verl")
OTHERS = "other programs"
WITHOUT = "-"  # in place of a key: this project has no such setting


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of other projects.

    Attributes:
        key: the key or group of this project; `WITHOUT`: there is none, and `note` says what to do.
        names: the names in each of `PROJECTS`, with blanks between them; the first is the current name.
        note: what differs; `<value there>: <value here>` for values that differ.
        value: the value here; None: the value there; `<value>`: it must be converted.
        others: names of `OTHERS`, with blanks between them.
    """

    key: str
    names: tuple[str, str, str]
    note: str = ""
    value: str | None = None
    others: str = ""

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each name with the project that uses it."""
        for project, names in zip((*PROJECTS, OTHERS), (*self.names, self.others), strict=True):
            for name in names.split():
                yield name, project

    def setting(self, value: str) -> str:
        """Return the assignment here for a value there."""
        meant = dict(re.findall(r"([\w-]+): ([\w-]+)", self.note)).get(value)
        return as_typed(self.key, meant or self.value or value or "<value>")


def _tables() -> Iterator[tuple[Foreign, ...]]:
    """Yield the tables of foreign.txt: names in each of `PROJECTS`, then names of `OTHERS`."""
    text = (files("rlhf.config") / "foreign.txt").read_text(encoding="utf-8")
    for table in re.sub(r"\n +", " ", text).split("\n\n"):
        width, rows = 0, []
        for line in table.strip().splitlines():
            width = width or ("|" in line and line.count("|"))
            if not line.startswith("#"):
                key, *names, value, note = (
                    each.strip() for each in (line + "|" * (width - line.count("|"))).split("|")
                )
                if not names[1:]:
                    rows.append(Foreign(key, ("", "", ""), note, value or None, names[0]))
                else:
                    rows.append(Foreign(key, (names[0], names[1], names[2]), note, value or None))
        yield tuple(rows)


TABLE, ELSEWHERE = _tables()


def meaning(word: str, known: Collection[str] = ()) -> tuple[Foreign, str, str] | None:
    """Return the row, the name and the project of a setting of another project; None: no project has it.

    Args:
        word: the name as typed, with or without the sections before it.
        known: keys of this project that the config has, for a name with several meanings; empty: any.
    """
    wanted = plain(word)
    found: dict[bool, list[tuple[Foreign, str, str]]] = {True: [], False: []}
    for each in (*TABLE, *ELSEWHERE):
        for name, project in each.named():
            if f".{wanted}".endswith(f".{plain(name)}"):
                found[True].append((each, name, project))
            elif plain(name).rpartition(".")[2] == wanted.rpartition(".")[2]:
                found[False].append((each, name, project))
    longest = max((len(name) for _, name, _ in found[True]), default=0)  # with the most sections
    matches = [match for match in found[True] if len(match[1]) == longest] or found[False]
    return next((match for match in matches if match[0].key in known), matches[0] if matches else None)


def plain(name: str) -> str:
    """Return a name in lower case, with `_` in place of `-` and without signs of Hydra before it."""
    return name.lower().lstrip("+~-").replace("-", "_")
