"""95 % confidence intervals of measured probabilities and means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf.core.formatting import figure

_Z95 = 1.959963984540054  # 95 % of the standard normal distribution lies between -Z95 and Z95


def wilson(part: float, count: int, z: float = _Z95) -> tuple[float, float]:
    """Return the Wilson score interval (Wilson 1927) of a probability.

    Unlike part +- z sqrt(part (1 - part) / count), the interval lies in [0, 1], and its width is not zero if
    all trials or no trials succeeded.

    Args:
        part: fraction of the trials that succeeded.
        count: number of independent trials.
        z: quantile of the standard normal distribution; the default gives a 95 % interval.

    Returns:
        Lower and upper bound; (0, 1) without trials.
    """
    if count < 1:
        return 0.0, 1.0
    centre = (part + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(part * (1 - part) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_bounds(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % normal interval of a mean, mean -+ 1.96 s / sqrt(n).

    Args:
        values: n independent values with the standard deviation s.

    Returns:
        None for fewer than two values, from which s cannot be estimated.
    """
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    half = _Z95 * math.sqrt(variance / len(values))
    return centre - half, centre + half


def with_bounds(name: str, value: float, interval: tuple[float, float] | None) -> dict[str, float]:
    """Return a metric, and the bounds of its interval, if any, as `<name>_low` and `<name>_high`."""
    if interval is None:
        return {name: value}
    return {name: value, f"{name}_low": interval[0], f"{name}_high": interval[1]}


def rate(name: str, part: float, count: int) -> dict[str, float]:
    """Return a metric that is a fraction of `count` trials, with the bounds of its 95 % interval."""
    return with_bounds(name, part, wilson(part, count))


def bounds(row: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Return the bounds of the interval of the metric `name` in a row of metrics; None without an interval.

    Rows of earlier versions have half the width of the interval instead, as `<name>_ci95`.
    """
    if f"{name}_low" in row:
        return row[f"{name}_low"], row[f"{name}_high"]
    half = row.get(f"{name}_ci95")
    return None if half is None else (row[name] - half, row[name] + half)


def text(row: Mapping[str, float], name: str) -> str:
    """Return the metric `name` of a row with its interval, if any, as text; empty if it is not in the row."""
    if name not in row:
        return ""
    interval = bounds(row, name)
    return figure(row[name]) + ("" if interval is None else " [{}, {}]".format(*map(bound, interval)))


def bound(value: float) -> str:
    """Return a bound of an interval as text, with fewer digits than `figure` outside the range of a share."""
    if -0.1 < value <= 1 or abs(value) >= 99.95:
        return figure(value)
    return f"{value:.{2 if abs(value) < 9.995 else 1}f}"
