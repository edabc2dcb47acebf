"""Format values for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.root import Config


def read(cfg: Config, key: str) -> float | None:
    """The number that a dotted key names."""
    value = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]


def plain(value: float) -> str:
    """A number as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` that is closest to `value`, at least one."""
    return max(1, round(value / of)) * of
