"""Scores and rewards that user code returns."""

from __future__ import annotations

import math

import numpy as np

_MOST = float(np.finfo(np.float32).max)


def as_score(value: object) -> float | None:
    """Return a score from user code as a float; None if `value` is no number, or not finite in float32.

    A number of the type float32 means the decimal that it is printed as, so that equal sums can tie.
    """
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # float() accepts any number type
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if not abs(number) <= _MOST:  # NaN, too
        return None
    return in_float32(number) if str(getattr(value, "dtype", "")).endswith("float32") else number


def in_float32(number: float) -> float:
    """Return the shortest decimal that is rounded to the same float32 as `number`."""
    return float(str(np.float32(number)))


def not_a_score(value: object) -> str:
    """Return, for a message about a value that is no score, the limit of float32 if `value` exceeds it."""
    beyond = isinstance(value, int | float) and _MOST < abs(value) < math.inf
    return " below 3.4e38, the limit of float32" if beyond else ""
