"""Meanings of config keys, for `--help` and docs/reference."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from rlhf.config.schema import Choice, fact


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
