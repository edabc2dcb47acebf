"""What a section chooses: the class or function at its address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf.config.address import load_module
from rlhf.config.schema import PARTS, Section


def part(section: Section) -> Callable[..., Any]:
    """What makes the part that `section` chooses; imports it."""
    module, _, name = PARTS[type(section)].partition(":")
    return getattr(load_module(module), name)
