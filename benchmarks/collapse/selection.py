"""Selection of the limits of the warning, and the errors of the rule with given limits.

The rule is `rlhf.training.collapse.CollapseRule`; this module replays its averages row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.collapse.cases import EARLY, Case
from rlhf.training.collapse import RISING, CollapseRule, Limits

GRID: dict[str, tuple[float | None, ...]] = {
    "kl": (None, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5),
    "rise": (None, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    "entropy": (None, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "ess": (None, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3),
    "gradient": (None, 1.5, 2.0, 3.0, 5.0, 10.0),
}
MEMORIES = (1.0, 2.0, 4.0, 8.0, 16.0)  # updates


@dataclass(frozen=True)
class Quality:
    """Errors of a rule over some cases.

    Attributes:
        leads: updates from warning to collapse, of each collapsed run; -inf: there was no warning.
        alarms: whether each stable run had a warning.
    """

    leads: Sequence[float]
    alarms: Sequence[bool]

    @property
    def early(self) -> int:
        """The number of collapsed runs with a warning at least `EARLY` updates before the collapse."""
        return sum(lead >= EARLY for lead in self.leads)


def crossings(case: Case, memory: float) -> dict[str, np.ndarray]:
    """Return, for each signal, the update at which its average first passes each limit of `GRID`.

    A limit of None is never passed (infinity).
    """
    rule = CollapseRule(limits=Limits(memory=memory))
    averages = []
    for row in case.rows:
        rule.observe(row)
        averages.append(dict(rule.averages))
    updates = np.array([row["update"] for row in case.rows])
    found = {}
    for signal, limits in GRID.items():
        values = np.array([average.get(signal, math.nan) for average in averages])
        first = []
        for limit in limits:
            beyond = math.nan if limit is None else limit  # no value is beyond nan
            passed = np.flatnonzero(values > beyond if signal in RISING else values < beyond)
            first.append(float(updates[passed[0]]) if len(passed) else math.inf)
        found[signal] = np.array(first)
    return found


def quality(cases: Sequence[Case], warned: Sequence[float]) -> Quality:
    """Return the errors of a rule that warned at the updates `warned` (infinity: never)."""
    pairs = list(zip(cases, warned, strict=True))
    return Quality(
        [case.collapse - at for case, at in pairs if case.collapse is not None],
        [at < math.inf for case, at in pairs if case.collapse is None],
    )


def warned_by(cases: Sequence[Case], limits: Limits) -> list[float]:
    """Return the update at which the rule with the given limits warns in each case; infinity: never."""
    found = []
    for case in cases:
        rule = CollapseRule(limits=limits)
        at = (row["update"] for row in case.rows if rule.observe(row) is not None)
        found.append(next(at, math.inf))
    return found


def combinations(signals: Sequence[str]) -> np.ndarray:
    """Return the combinations of limits, as positions in `GRID`, in which only `signals` have a limit.

    Returns:
        [combinations, signals of `GRID`]; at least one signal has a limit.
    """
    sizes = [len(limits) if name in signals else 1 for name, limits in GRID.items()]
    return np.indices(sizes).reshape(len(sizes), -1).T[1:]


def selected(cases: Sequence[Case], signals: Sequence[str] = tuple(GRID)) -> Limits:
    """Return the limits for which the larger of the two error rates on `cases` is smallest.

    Among equal limits, those with fewer signals and then those with the longer lead are selected.
    """
    collapse = np.array([math.nan if case.collapse is None else case.collapse for case in cases])
    stable = np.isnan(collapse)
    places = combinations(signals)
    used = np.sum(places > 0, axis=1)
    best: tuple[tuple[float, ...], Limits] | None = None
    for memory in MEMORIES:
        passed = [crossings(case, memory) for case in cases]
        at = [np.stack([each[name] for each in passed], 1)[places[:, n]] for n, name in enumerate(GRID)]
        warned = np.minimum.reduce(at)  # [combinations, cases]
        leads = collapse[~stable] - warned[:, ~stable]
        recall, silent = np.mean(leads >= EARLY, axis=1), np.mean(np.isinf(warned[:, stable]), axis=1)
        ranks = np.stack([np.minimum(recall, silent), recall + silent, -used, np.median(leads, axis=1)], 1)
        top = ranks[np.lexsort(ranks.T[::-1])[-1]]
        if best is None or tuple(top) > best[0]:
            first = places[np.flatnonzero(np.all(ranks == top, axis=1))[0]]
            limits = {name: GRID[name][place] for name, place in zip(GRID, first, strict=True)}
            best = tuple(top), Limits(**limits, memory=memory)
    assert best is not None
    return best[1]


def measured(cases: Sequence[Case], limits: Limits) -> Quality:
    """Return the errors of the rule with `limits` on `cases`."""
    return quality(cases, warned_by(cases, limits))
