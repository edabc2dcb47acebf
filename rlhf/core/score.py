"""Scores and rewards that user code returns."""

from __future__ import annotations

import math

import torch


def as_score(value: object) -> float | None:
    """Return a score from user code as a float; None if `value` is no number, or not finite in float32."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # float() accepts any number type
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= torch.finfo(torch.float32).max else None  # NaN gives None


def not_a_score(value: object) -> str:
    """Return, for a message about a value that is no score, the limit of float32 if `value` exceeds it."""
    beyond = isinstance(value, int | float) and torch.finfo(torch.float32).max < abs(value) < math.inf
    return " below 3.4e38, the limit of float32" if beyond else ""
