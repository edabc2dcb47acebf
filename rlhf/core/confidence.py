"""Confidence intervals of measured probabilities."""

from __future__ import annotations

import math

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
