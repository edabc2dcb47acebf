"""Forms in which data sets store texts and dialogues, and their conversion. This module imports no torch."""

from __future__ import annotations

import ast
import json
import logging
from functools import lru_cache
from typing import Any

log = logging.getLogger(__name__)

Row = dict[str, Any]
TOOLS = "tools"  # column beside messages: the functions that the assistant may call, as JSON schemas
ASSISTANT = "\n\nAssistant:"  # before each answer in dialogues that are one text, as in hh-rlhf


class BadRow(Exception):
    """A row without the required content; the caller adds the key and the place to the message.

    Args:
        rule: what the data must have, after "<key> must".
        got: what the row has, after the place of the row.
        remedy: what to do about such a row.
    """

    def __init__(self, rule: str, got: str, remedy: str = "correct or remove that row") -> None:
        super().__init__(rule, got)
        self.rule = rule
        self.got = got
        self.remedy = remedy

    def problem(self, key: str, place: str) -> str:
        """Return the error message for the row at `place` of the data that `key` names."""
        return f"{key} must {self.rule}, got {place} {self.got}; {self.remedy}"


class Written(float):
    """A number of a JSON file that has its digits, such as 1.50 or 1e3, as text."""

    written: str

    def __new__(cls, text: str) -> Written:
        """Return the number that a text means."""
        made = super().__new__(cls, text)
        made.written = text
        return made

    def __str__(self) -> str:
        return self.written


def number_as_text(value: Any, column: str) -> str | None:
    """Return a number as text, as it is written in the data; None: the value is no number.

    Of a number with a fraction, only JSON has the digits. Other formats store it in binary.
    """
    if isinstance(value, bool) or not isinstance(value, int | Written):
        return None
    note(f"numbers in the column {column} are read as text, as they are written")
    return str(value)


@lru_cache
def note(text: str) -> None:
    """Say once how data are read."""
    log.warning("%s", text)


def parsed(row: Row) -> Row:
    """Return a row with lists of messages in place of their texts in JSON, or as Python prints them."""
    return {name: messages_of(value) for name, value in row.items()}


def messages_of(value: Any) -> Any:
    """Return the messages that a text contains, or the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or "{" not in value:
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return found if is_dialogue(found) else value
    return value


def is_dialogue(value: Any) -> bool:
    """Return whether a value is a list of messages: of objects with a role."""
    found = value if isinstance(value, list) else []
    return found != [] and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in found)


def without_prompt(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """Return the prompt and the two answers of a pair of whole dialogues, each one text; None: not so.

    The prompt ends with the last `ASSISTANT` of the part that both texts share, as in hh-rlhf.
    """
    shared = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    shared = min(len(chosen), len(rejected)) if shared is None else shared
    at = chosen.rfind(ASSISTANT, 0, shared)
    if at < 0:
        return None
    end = at + len(ASSISTANT)
    return chosen[:end], chosen[end:], rejected[end:]


def rows_of_table(value: Any) -> list[Row] | None:
    """Return the rows of a table that pandas wrote (`DataFrame.to_json`); None: it is no table.

    The forms are {"column": {"0": value, ...}, ...}, {"0": {"column": value, ...}, ...} and
    {"columns": [...], "index": [...], "data": [[...]]}.
    """
    if not isinstance(value, dict) or not value:
        return None
    if value.keys() == {"columns", "index", "data"} and all(
        isinstance(each, list) for each in value.values()
    ):
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    columns = list(value.values())
    if not all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        return None
    if columns[0] and all(str(index).isdigit() for index in value):
        return columns  # the rows
    if not columns[0] or not all(str(index).isdigit() for index in columns[0]):
        return None
    return [{name: column[index] for name, column in value.items()} for index in columns[0]]
