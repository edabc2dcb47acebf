"""How far a measured figure may be from what it measures. Pure maths."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # of the standard normal: between -z and z lie 95 %


def wilson(part: float, count: int, z: float = Z95) -> tuple[float, float]:
    """The 95 % interval of a probability of which `part` was seen in `count` independent trials.

    The score interval (Wilson 1927): unlike part +- z sqrt(part (1 - part) / n) it stays in [0, 1], and is
    no point where all or none succeeded.
    """
    if count < 1:
        return 0.0, 1.0
    centre = (part + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(part * (1 - part) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)
