"""Construction of the part that a config section configures, from the address in the section's `option`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlhf.config.schema import PARTS, Section


def part(section: Section) -> Any:
    """Import and return the class or function at the address of the option of `section`.

    Raises:
        KeyError: the option declares no address. A section does not inherit the address of its base class.
    """
    module, _, name = PARTS[type(section)].partition(":")
    return getattr(import_module(module), name)


def make(section: Section, *context: object) -> Any:
    """Return the part that `section` configures, by calling its factory with `section` and `context`."""
    return part(section)(section, *context)
