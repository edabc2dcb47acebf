"""Statistics of a study with few seeds: intervals, tests, verdicts, noise ceilings, numbers of seeds.

A sample has one value per seed. Seeds are few, so intervals and tests are those of Student's t: with five
seeds, 95 % bootstrap intervals contain the true mean in about 84 % of studies, t intervals in 94 %.
Differences are taken within seeds (paired), and many comparisons are corrected by Holm. The exact sign-flip
test confirms a t test where there are enough seeds. A table of values is [methods, seeds].
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, special

LEVEL, POWER = 0.05, 0.8  # probability of a false statement; of finding a difference that exists

_Sample = Sequence[float] | np.ndarray  # one value per seed
Side = Literal["two-sided", "less", "greater"]


class Estimate(NamedTuple):
    """A statistic of a sample with its interval (nan for one value), and the number of seeds."""

    centre: float
    low: float
    high: float
    seeds: int


# -- intervals -------------------------------------------------------------------------------------------


def mean_interval(values: _Sample) -> Estimate:
    """Return the mean with its t interval; the interval of equal values has width 0."""
    x = np.asarray(values, float)
    centre, n = float(x.mean()), len(x)
    if n < 2:
        return Estimate(centre, math.nan, math.nan, n)
    half = float(special.stdtrit(n - 1, 1 - LEVEL / 2) * x.std(ddof=1) / math.sqrt(n))
    return Estimate(centre, centre - half, centre + half, n)


def bounded_interval(values: _Sample, least: float, most: float) -> Estimate:
    """Return the mean of values between two bounds with a t interval that holds for equal values, too.

    The interval is that of the values and of each bound twice, as for a share: Agresti and Coull, 1998.
    """
    centre, *ends = mean_interval([*values, *(least, most) * 2])[:3]
    low, high = np.clip(ends, least, most)
    return Estimate(float(np.mean(values)) if len(values) else centre, float(low), float(high), len(values))


def iqm(values: np.ndarray | Sequence, axis: int | None = None) -> np.ndarray:
    """Return the interquartile mean: the mean without the lowest and the highest quarter (rounded down).

    It is for values of several tasks and seeds together. Of five seeds, it would drop the one that collapsed.
    """
    from scipy import stats

    return stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(
    *strata: _Sample,
    statistic: Callable[..., np.ndarray] = iqm,
    method: Literal["percentile", "BCa"] = "percentile",
    resamples: int = 9999,
) -> Estimate:
    """Return a statistic with its bootstrap interval, for at least 20 values; too narrow for a few seeds.

    Several strata, such as the values of several tasks, are resampled each and analysed together.
    """

    def of_all(*samples: np.ndarray, axis: int) -> np.ndarray:
        return statistic(np.concatenate(samples, axis=axis), axis=axis)

    from scipy import stats

    x = np.concatenate(strata).astype(float)
    centre = float(statistic(x, axis=0))
    if all(np.ptp(each) == 0 for each in strata):  # scipy returns nan
        return Estimate(centre, centre, centre, len(x))
    found = stats.bootstrap(
        strata, of_all, n_resamples=resamples, method=method, vectorized=True, rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(centre, float(found.low), float(found.high), len(x))


# -- tests -----------------------------------------------------------------------------------------------


def p_t(values: _Sample, limit: float = 0.0, side: Side = "two-sided") -> float:
    """Return the p-value of the t test of a mean against a limit; paired, if the values are differences.

    Equal values have no spread that a t test could use; their p-value is that of the sign-flip test.
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        return math.nan
    if np.ptp(x) < 1e-12:
        return p_sign_flip(x, limit, side)
    t = (x.mean() - limit) / (x.std(ddof=1) / math.sqrt(len(x)))
    return _of_side(special.stdtr(len(x) - 1, t), special.stdtr(len(x) - 1, -t), side)


@cache
def _signs(seeds: int) -> np.ndarray:
    """Return all signs of the values of so many seeds [2 ** seeds, seeds]; of more than 16 a random part."""
    if seeds <= 16:
        return np.array(list(product((1.0, -1.0), repeat=seeds)))
    drawn = np.random.default_rng(0).choice([1.0, -1.0], (2**16, seeds))
    drawn[0] = 1  # the signs of the values are one of the possibilities
    return drawn


def p_sign_flip(values: _Sample, limit: float = 0.0, side: Side = "two-sided") -> float:
    """Return the p-value of the sign-flip test, which is exact for every symmetric distribution."""
    x = np.asarray(values, float) - limit
    means, observed = (_signs(len(x)) * x).mean(1), x.mean()
    rounding = 100 * np.finfo(float).eps * abs(observed)  # as in scipy, which is slower
    return _of_side(np.mean(means <= observed + rounding), np.mean(means >= observed - rounding), side)


def _of_side(less: float, greater: float, side: Side) -> float:
    return float({"less": less, "greater": greater, "two-sided": min(1.0, 2 * min(less, greater))}[side])


def smallest_p(seeds: int) -> float:
    """Return the smallest two-sided p-value of the sign-flip test."""
    return 2.0 / 2**seeds


def p_value(
    values: _Sample, limit: float = 0.0, side: Side = "two-sided", family: int = 1, level: float = LEVEL
) -> float:
    """Return the p-value of the t test, or of the sign-flip test if that is larger and could reach `level`.

    Args:
        values: one value, or difference, per seed.
        limit: the mean that the values are tested against.
        side: the alternative.
        family: number of comparisons that are corrected together.
        level: probability of a false finding.
    """
    p = p_t(values, limit, side)
    if smallest_p(len(values)) * family > level:
        return p
    return max(p, p_sign_flip(values, limit, side))


def unpaired(
    samples: Sequence[_Sample], weights: Sequence[float], limit: float = 0.0, side: Side = "two-sided"
) -> tuple[Estimate, float]:
    """Return a weighted sum of the means of samples without common seeds, and its p-value against a limit.

    The test is that of Welch and Satterthwaite; for two samples and weights 1 and -1 that of Welch.
    """
    centre = sum(weight * float(np.mean(x)) for x, weight in zip(samples, weights, strict=True))
    variances = [weight**2 * np.var(x, ddof=1) / len(x) for x, weight in zip(samples, weights, strict=True)]
    error, n = math.sqrt(sum(variances)), min(map(len, samples))
    if error == 0:
        return Estimate(centre, centre, centre, n), float(centre == limit)
    freedom = error**4 / sum(v**2 / (len(x) - 1) for x, v in zip(samples, variances, strict=True))
    half, t = float(special.stdtrit(freedom, 1 - LEVEL / 2)) * error, (centre - limit) / error
    p = _of_side(special.stdtr(freedom, t), special.stdtr(freedom, -t), side)
    return Estimate(centre, centre - half, centre + half, n), p


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for the number of comparisons (Holm 1979)."""
    order = np.argsort(p)
    found = np.empty(len(p))
    found[order] = np.maximum.accumulate(np.minimum(1.0, np.asarray(p)[order] * np.arange(len(p), 0, -1)))
    return found.tolist()


def distinct(samples: Mapping[str, _Sample]) -> dict[str, list[str]]:
    """Return the names of samples by the first name with the same values: equal methods count as one."""
    found: dict[str, list[str]] = {}
    for name, values in samples.items():
        same = (other for other in found if np.array_equal(samples[other], values))
        found.setdefault(next(same, name), []).append(name)
    return found


# -- numbers of seeds ------------------------------------------------------------------------------------


def power(difference: float, sd: float, seeds: int, level: float = LEVEL) -> float:
    """Return the probability that a two-sided paired t test finds a difference.

    Args:
        difference: the true mean of the differences.
        sd: their standard deviation between seeds.
        seeds: number of seeds, at least 2.
        level: probability of a false finding.
    """
    if sd == 0:
        return float(difference != 0)
    limit, shift = special.stdtrit(seeds - 1, 1 - level / 2), abs(difference) / sd * math.sqrt(seeds)
    found = 1 - special.nctdtr(seeds - 1, shift, limit) + special.nctdtr(seeds - 1, shift, -limit)
    return float(found) if math.isfinite(found) else 1.0  # nan: the effect is too large for scipy


def seeds_needed(difference: float, sd: float, level: float = LEVEL) -> int:
    """Return how many seeds (up to a million) find a difference with probability `POWER`."""
    return 2 + bisect_left(range(2, 10**6), True, key=lambda n: power(difference, sd, n, level) >= POWER)


def sd_limit(sd: float, seeds: int) -> float:
    """Return the upper 80 % limit of a standard deviation: with five seeds 1.6 times the estimate."""
    return sd * math.sqrt((seeds - 1) / special.chdtri(seeds - 1, 0.8))


def detectable(sd: float, seeds: int, level: float = LEVEL) -> float:
    """Return the smallest difference that is found with probability `POWER`."""
    return sd * _detectable(seeds, level)


@cache
def _detectable(seeds: int, level: float) -> float:
    return float(optimize.brentq(lambda ratio: power(ratio, 1, seeds, level) - POWER, 1e-3, 100))


# -- rankings and noise ----------------------------------------------------------------------------------


_SPLITS = 1000  # if there are more splits, so many are drawn


def split_half(table: np.ndarray) -> np.ndarray:
    """Return Kendall's tau between the rankings by two halves of the seeds, for each split.

    Args:
        table: values [methods, seeds]; all methods are split at the same seeds.
    """
    seeds = range(table.shape[1])
    few = len(seeds) // 2
    if math.comb(len(seeds), few) > _SPLITS:
        rng = np.random.default_rng(0)
        halves = [tuple(rng.choice(len(seeds), few, replace=False)) for _ in range(_SPLITS)]
    else:  # with an even number each split comes twice: those with the first seed are enough
        halves = [half for half in combinations(seeds, few) if 2 * few < len(seeds) or half[0] == 0]
    others = [[seed for seed in seeds if seed not in half] for half in halves]
    means = (table[:, np.array(half)].mean(2) for half in (halves, others))  # [methods, splits]
    return tau(*means)


def tau(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b between rankings by values [methods, ...] of two kinds; 0 without any order."""
    one, other = (np.sign([a - b for a, b in combinations(each, 2)]) for each in (first, second))  # pairs
    ordered = np.sqrt(np.abs(one).sum(0) * np.abs(other).sum(0))
    return (one * other).sum(0) / np.maximum(ordered, 1)


def signal(table: np.ndarray) -> float:
    """Return the variance of the methods over the variance of one seed, on the scale of ranks.

    The mean tau of split halves becomes a correlation of ranks, r = sin(pi tau / 2). The signal s solves
    sqrt(s / (s + 1/h) s / (s + 1/k)) = r for halves of h and k seeds (Spearman-Brown).

    Args:
        table: values [methods, seeds].
    """
    h = table.shape[1] // 2
    k = table.shape[1] - h
    r = math.sin(math.pi * float(split_half(table).mean()) / 2)
    if not 0 < r < 1:
        return math.inf if r >= 1 else 0.0
    half = r**2 * (1 / h + 1 / k) / 2  # a quadratic equation in s
    return (half + math.sqrt(half**2 + (1 - r**2) * r**2 / (h * k))) / (1 - r**2)


def ceiling(signals: Sequence[float], seeds: int) -> float:
    """Return the tau that two rankings have if only noise separates them.

    Args:
        signals: the signal of one table, for two rankings of its methods by other seeds; or the signals of
            two tables, whose rankings are compared.
        seeds: number of seeds of each ranking.
    """
    reliable = [1.0 if math.isinf(s) else s / (s + 1 / seeds) for s in signals]
    return 2 / math.pi * math.asin(math.prod(reliable) ** (1 / len(reliable)))


def seeds_for_ceiling(signal: float, tau: float = 0.8) -> int | None:
    """Return the number of seeds with which the ceiling of one table is `tau`; None without a signal."""
    if signal == 0:
        return None
    reliable = math.sin(math.pi * tau / 2)
    return max(1, math.ceil(reliable / (1 - reliable) / signal))


def saturation(table: np.ndarray) -> float:
    """Return the share of methods that have exactly the most common value of their seed.

    Above about 0.3 the task does not separate the methods, whatever the number of seeds.

    Args:
        table: values [methods, seeds].
    """
    return float(np.mean([np.unique(column, return_counts=True)[1].max() for column in table.T])) / len(table)


def components(table: np.ndarray) -> tuple[float, float, float]:
    """Return the variance of rows, of columns, and of residuals (two-way analysis of variance).

    An estimate may be negative.
    """
    n, m = table.shape
    rows, columns = table.mean(1), table.mean(0)
    rest = table - rows[:, None] - columns[None, :] + table.mean()
    residual = float((rest**2).sum() / ((n - 1) * (m - 1)))
    return float(rows.var(ddof=1)) - residual / m, float(columns.var(ddof=1)) - residual / n, residual


def evaluation_share(outcomes: np.ndarray, prompts: int) -> float:
    """Return the share of the variance between seeds that is noise of evaluations with so many prompts.

    Args:
        outcomes: results [seeds, prompts] of single held-out prompts, all seeds with the same prompts.
        prompts: number of prompts of the evaluation that is judged.
    """
    seeds, _, residual = components(outcomes)
    noise = residual / prompts
    return noise / (max(0.0, seeds) + noise) if noise else 0.0


# -- comparisons of responses ----------------------------------------------------------------------------


def bradley_terry(wins: np.ndarray, precision: float = 0.1) -> np.ndarray:
    """Return the strengths [K] that explain comparisons best; their mean is 0.

    P(i wins against j) = sigmoid(s_i - s_j) (Bradley and Terry 1952), fitted with the penalty
    `precision` / 2 |s|^2. Without the penalty, one that always wins has no finite strength.

    Args:
        wins: [K, K], how often i won against j; a tie is half a win of both.
        precision: weight of the penalty, 0 for none.
    """
    strengths, count = np.zeros(len(wins)), wins + wins.T
    for _ in range(100):
        p = special.expit(strengths[:, None] - strengths)
        curvature = count * p * (1 - p)
        hessian = np.diag(curvature.sum(1) + precision) - curvature
        gradient = (wins - count * p).sum(1) - precision * strengths
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0].clip(-1, 1)
        strengths = strengths + step
        if abs(step).max() < 1e-12:
            break
    return strengths - strengths.mean()


def length_controlled(name: str, points: np.ndarray, longer: np.ndarray) -> dict[str, float]:
    """Return the win rate that is expected at equal lengths, its 95 % interval, and the effect of length.

    P(win) = sigmoid(theta + phi tanh(D / sd(D))), fitted with the penalty 0.005 (theta^2 + phi^2). Without
    the penalty, a judge that always prefers the longer response has no finite fit. The rate is
    sigmoid(theta), its interval that of the sandwich estimator. The term of length is that of AlpacaEval 2
    (Dubois et al., arXiv 2404.04475), whose difficulties of single instructions are left out.

    Args:
        name: name of the metric.
        points: points of the comparisons: 1, 0.5 or 0.
        longer: D, the length of each response minus that of the response it is compared with.

    Returns:
        `<name>`, `<name>_low`, `<name>_high` and eval/length_effect (phi); empty if all D are equal.
    """
    if len(points) < 2 or np.ptp(longer) == 0:
        return {}
    x = np.stack([np.ones(len(points)), np.tanh(longer / longer.std(ddof=1))], 1)
    fit, penalty, step = np.zeros(2), 0.01 * np.eye(2), np.ones(2)
    for _ in range(100):
        p = special.expit(x @ fit)
        hessian = x.T * (p * (1 - p)) @ x + penalty
        step = np.linalg.solve(hessian, x.T @ (points - p) - penalty @ fit)
        fit = fit + step
        if abs(step).max() < 1e-12:
            break
    inverse = np.linalg.inv(hessian)
    error = math.sqrt((inverse @ (x.T * (points - p) ** 2 @ x) @ inverse)[0, 0])
    z = float(special.ndtri(1 - LEVEL / 2))
    ends = zip((name, f"{name}_low", f"{name}_high"), (0, -z, z), strict=True)
    found = {key: float(special.expit(fit[0] + each * error)) for key, each in ends}
    return {**found, "eval/length_effect": float(fit[1])}
