"""Functions of numbers: differences within seeds, interpolation at a KL, slopes.

Intervals, tests and noise ceilings are in `rlhf.core.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Return first - second of each seed that both have, in the order of seeds."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Return the value at a KL, interpolated where the KL first rises to it; None if the KL stays below.

    The interpolation is linear in the square root of the KL, in which gold scores are close to linear while
    they rise (Gao et al., 2210.10760).

    Args:
        points: (KL, value) of the evaluations of a run, in the order of updates.
        kl: the KL.
    """
    for (before, low), (after, high) in zip(points, points[1:], strict=False):
        if before <= kl <= after and before < after:
            start, end = math.sqrt(max(0.0, before)), math.sqrt(after)
            return low + (high - low) * (math.sqrt(kl) - start) / (end - start)
    return None


def slopes(values: Mapping[int, Mapping[int, float]]) -> list[float]:
    """Return the slope of the value over log2 of N, of each seed that has all N.

    Args:
        values: N -> seed -> value.
    """
    seeds = set.intersection(*(set(found) for found in values.values())) if len(values) > 1 else set()
    x = [math.log2(n) for n in values]
    return [float(np.polyfit(x, [values[n][seed] for n in values], 1)[0]) for seed in sorted(seeds)]
