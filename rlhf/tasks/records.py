"""Columns of the data that reward functions ask for. They travel with a prompt as its record.

A source adds the column `record` to its rows: the columns of the row that a function asks for, as JSON text.
Without such a function, there is no record. This module imports no torch and no `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rlhf.config.parameters import GIVEN
from rlhf.core.errors import UserError
from rlhf.tasks.formats import BadRow

if TYPE_CHECKING:
    from rlhf.tasks.reading import Row

RECORD = "record"


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The columns of the data that the reward functions of a run ask for.

    Attributes:
        columns: name of a column -> config key and address of a function that cannot do without the column.
        optional: names of columns that a function receives if the data have them.
        rest: a function receives all columns (`**kwargs`).
        parts: the columns of each part of a mixture of tasks, by the name of the part.
        positions: name of a parameter that receives another value by position -> key, address and that value.
    """

    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    rest: bool = False
    parts: Mapping[str, Wanted] = field(default_factory=dict)
    positions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.asks or bool(self.positions) or any(self.parts.values())

    @property
    def asks(self) -> bool:
        """Whether a function asks for columns, so that rows have a record."""
        return bool(self.columns or self.optional or self.rest)

    def read(self, names: Collection[str], available: Collection[str], place: str) -> list[str] | None:
        """Return the columns of a file to read: `names` and those of the record; None: all columns.

        Args:
            names: columns that are read anyway.
            available: all columns of the data.
            place: the data, for messages.

        Raises:
            UserError: a function asks for a column that the data lack, or receives another value instead.
        """
        for name, (key, path, value) in self.positions.items():
            if name in available and (value == "response" or name not in names):
                raise UserError(
                    f"{key} must name a function with a parameter response if others are columns of the data "
                    f"(without it, {name} would be the {value}), got {path} for {place} with the column "
                    f"{name}; rename the parameter that is the response to response"
                )
        for name, (key, path) in self.columns.items():
            if name not in available:
                near = get_close_matches(name, available, n=1)
                remedy = f"did you mean {near[0]}?" if near else "rename the parameter, or give it a default"
                raise UserError(
                    f"{key} must name a function whose parameters are prompt, response, reference, messages "
                    f"or columns of the data ({', '.join(available)}), got {path} with the parameter {name}, "
                    f"which {place} lacks; {remedy}"
                )
        return None if self.rest else list(dict.fromkeys([*names, *self.columns, *self.optional]))

    def record(self, row: Row) -> str:
        """Return the columns of a row that functions ask for, as JSON text; dates and decimals become texts.

        Raises:
            BadRow: a column has binary data, such as an image.
        """
        kept = row.keys() - GIVEN if self.rest else {*self.columns, *self.optional}
        asked = {name: row[name] for name in row if name in kept}
        for name in filter(lambda name: _has_bytes(asked[name]), asked):
            rule = f"have texts, numbers, lists or objects in its column {name}, which a function receives"
            remedy = f"remove the column {name}, or write its texts as strings"
            raise BadRow(rule, "with bytes (such as an image or a sound)", remedy)
        return json.dumps(asked, default=str)

    def recording(self, convert: Callable[[Row], Row]) -> Callable[[Row], Row]:
        """Return the function `convert`, which also adds the record to a row."""
        return lambda row: {**convert(row), RECORD: self.record(row)} if self.asks else convert(row)


def _has_bytes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


NOTHING = Wanted()


def parsed(records: Collection[str]) -> list[dict[str, Any]]:
    """Return records as dictionaries."""
    return [json.loads(record) for record in records]
