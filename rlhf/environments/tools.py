"""Tools of the task `lookup`: a calculator, and a search over the lines of a local text file."""

from __future__ import annotations

import operator
import re
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

TOWNS = Path(__file__).with_name("towns.txt")
_MOST_FOUND = 3  # lines that a search returns


def calculate(first: float, operation: Literal["+", "-", "*", "/"], second: float) -> str:
    """Calculate with two numbers.

    Args:
        first: the first number.
        operation: what to do with them.
        second: the second number.
    """
    name = {"+": "add", "-": "sub", "*": "mul", "/": "truediv"}[operation]
    return f"{getattr(operator, name)(first, second):.10g}"


class Search:
    """A search over the lines of a text file; a subclass names another `file`."""

    file: ClassVar[str | Path] = TOWNS

    def search(self, query: str) -> str:
        """Search a text file, and return the lines that share the most words with the query.

        Args:
            query: words, such as the name of a town.
        """
        asked = _words(query)
        scored = [(len(asked & _words(line)), line) for line in lines(self.file)]
        most = max(scored)[0]
        found = [line for score, line in scored if score == most > 0]
        return "\n".join(found[:_MOST_FOUND]) or "nothing found"


@cache
def lines(file: str | Path) -> tuple[str, ...]:
    """Return the lines of a text file."""
    return tuple(Path(file).read_text(encoding="utf-8").splitlines())


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
