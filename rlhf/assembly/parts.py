"""Make the part that a config section chooses, from the address that the section's option declares."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlhf.config.schema import PARTS, Section


def part(section: Section) -> Any:
    """Import and return the class or function at the address of the option of `section`.

    Raises:
        KeyError: the option declares no address. Addresses are not inherited from a base section.
    """
    module, _, name = PARTS[type(section)].partition(":")
    return getattr(import_module(module), name)


def make(section: Section, *context: object) -> Any:
    """Return the part that `section` configures, made from the section and the context of its kind."""
    return part(section)(section, *context)
