"""95 % confidence intervals of measured probabilities and means."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # 95 % of the standard normal distribution lies between -Z95 and Z95


def wilson(part: float, count: int, z: float = Z95) -> tuple[float, float]:
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


def rate_half_width(part: float, count: int) -> float:
    """Return half the width of the 95 % Wilson interval of a probability; see `wilson`."""
    low, high = wilson(part, count)
    return (high - low) / 2


def mean_half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % normal interval of a mean, 1.96 s / sqrt(n).

    Args:
        values: n independent values with the standard deviation s.

    Returns:
        None for fewer than two values, from which s cannot be estimated.
    """
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return Z95 * math.sqrt(variance / len(values))
