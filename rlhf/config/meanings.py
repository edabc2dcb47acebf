"""Meanings of config keys, for `--help` and docs/reference: `means=`, else comments in the source."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args

from rlhf.config.schema import bound_of


def meaning(owner: type, name: str, hint: Any) -> list[str]:
    """Return the meaning of a key and of its choices, as one text each.

    Args:
        owner: the section class that declares the key.
        name: the field of the key.
        hint: the type of the field.
    """
    bound = bound_of(owner, name)
    text = bound.means if bound else comments(owner).get(name, "")
    parts = [text] if text else []
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, Enum):
            explained = comments(each)
            if not parts:
                parts.append(summary(each))
            parts += [
                f"`{choice.value}`: {explained[choice.name]}" for choice in each if choice.name in explained
            ]
    return parts


@cache
def comments(cls: type) -> dict[str, str]:
    """Return the comments of the fields (or members) of a class by name: behind the field, else above it."""
    source = Path(inspect.getsourcefile(cls) or "").read_text(encoding="utf-8")
    behind: dict[int, str] = {}  # line -> comment behind code
    above: dict[int, str] = {}  # line -> comment without code
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            place = behind if token.line[: token.start[1]].strip() else above
            place[token.start[0]] = token.string.lstrip("# ").rstrip()
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            for each in node.body:
                target = each.target if isinstance(each, ast.AnnAssign) else None
                if isinstance(each, ast.Assign):
                    target = each.targets[0] if isinstance(each.targets[0], ast.Name) else None
                lines = range(each.lineno, (each.end_lineno or each.lineno) + 1)
                comment = " ".join(behind[line] for line in lines if line in behind)
                if not comment:
                    comment = block_before(each.lineno, above)
                if isinstance(target, ast.Name) and comment:
                    found[target.id] = comment
    return found


def block_before(line: int, above: dict[int, str]) -> str:
    """Return the comment block that ends directly above a line, as one text."""
    first = line
    while first - 1 in above:
        first -= 1
    return " ".join(above[each] for each in range(first, line))


def summary(cls: type) -> str:
    """Return the first paragraph of the docstring of a class."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
