"""Statistics over seeds, as functions of numbers: means, bootstrap intervals, interpolation, ranks.

Intervals are percentile intervals of `scipy.stats.bootstrap` with 9,999 resamples of the seeds and a fixed
random generator, so that equal values give equal intervals. With five normally distributed values, 90 % of
these intervals (in a simulation) contain the true value, not 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
ROUNDING = 1e-5  # more than the rounding of a difference of values in the file of results


class Estimate(NamedTuple):
    """A statistic over seeds with its interval; without an interval (nan) for fewer than two seeds."""

    centre: float
    low: float
    high: float
    count: int


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the interquartile mean: the mean without the lowest and the highest quarter (rounded down)."""
    return stats.trim_mean(values, 0.25, axis=axis)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the interquartile mean of `values` (one per seed) with its interval; None without values."""
    if not values:
        return None
    found = np.asarray(values, dtype=float)
    centre = float(iqm(found))
    if len(found) < 2:
        return Estimate(centre, math.nan, math.nan, 1)
    if np.ptp(found) == 0:
        return Estimate(centre, centre, centre, len(found))
    interval = stats.bootstrap(
        (found,),
        iqm,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(centre, float(interval.low), float(interval.high), len(found))


def side(found: Estimate | None, limit: float, resolution: float, seeds: int) -> int | None:
    """Return the side of a limit on which an interval is: 1 above, -1 below, 0 if neither is certain.

    The interval counts as reaching at least `resolution` to both sides of the centre: equal values of a few
    seeds have an interval of width 0, but a single prompt would change each value.

    Args:
        found: the statistic with its interval.
        limit: the limit.
        resolution: the smallest difference that one evaluation can show.
        seeds: number of seeds of the study; an estimate from fewer seeds has no side (None).
    """
    if found is None or found.count < seeds:
        return None
    reach = resolution + ROUNDING
    if min(found.low, found.centre - reach) > limit:
        return 1
    return -1 if max(found.high, found.centre + reach) < limit else 0


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


def ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the rank of each method; 1 has the highest value, and equal values share their mean rank."""
    found = stats.rankdata([-value for value in values.values()])
    return {name: float(rank) for name, rank in zip(values, found, strict=True)}


class Agreement(NamedTuple):
    """Kendall's tau between two rankings, its p-value (no association), and the number of methods."""

    tau: float
    p: float
    count: int


def agreement(first: Mapping[str, float], second: Mapping[str, float]) -> Agreement | None:
    """Return the agreement of two rankings of the methods that both have; None for fewer than three."""
    names = [name for name in first if name in second]
    if len(names) < 3:
        return None
    found = stats.kendalltau([first[name] for name in names], [second[name] for name in names])
    return Agreement(float(found.statistic), float(found.pvalue), len(names))
