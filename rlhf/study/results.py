"""The rows of a study as values per cell and seed, and sums of cells with intervals and tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhf.core import statistics
from rlhf.core.statistics import LEVEL, Estimate, Side
from rlhf.study.cells import Cell, cell_of, cells
from rlhf.study.formula import SLOPE
from rlhf.study.rows import DIVERGED, FAILED, TABLE, Row, read_rows
from rlhf.study.spec import AT_KL, AT_TIME, COLLAPSED, LOSS, VALUE, Spec, Task

START = "start"  # the value before training, as a quantity
FEWEST = 3  # seeds without which nothing is stated
_OTHER: Mapping[Side, Side] = {"greater": "less", "less": "greater"}


class Term(NamedTuple):
    """A part of a sum: a weight, a cell, and a quantity: value, at_kl, at_time, collapsed or a metric."""

    weight: float
    cell: Cell
    quantity: str


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of cells, such as a difference or a slope."""

    samples: np.ndarray  # [cells, seeds]; nan: the seed has no value
    weights: Sequence[float]
    paired: bool  # whether the seeds of the cells share models and machine; else means are compared
    collapsed: int = 0  # number of collapsed runs in the cells
    doubtful: Collection[Side] = ()  # sides on which a collapsed cell would be called better

    @cached_property
    def values(self) -> np.ndarray:
        """The sum within each seed that all cells have."""
        return (each := np.asarray(self.weights) @ self.samples)[~np.isnan(each)]

    @cached_property
    def apart(self) -> list[np.ndarray]:
        """The values of each cell."""
        return [each[~np.isnan(each)] for each in self.samples]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.values) if self.paired else min(map(len, self.apart))

    @cached_property
    def estimate(self) -> Estimate:
        """The mean with its 95 % t interval; of fewer than `FEWEST` seeds with minimum and maximum."""
        if not self.seeds:
            return Estimate(math.nan, math.nan, math.nan, 0)
        if not self.paired:
            return statistics.unpaired(self.apart, self.weights)[0]
        x = self.values
        few = Estimate(float(x.mean()), float(x.min()), float(x.max()), len(x))
        return few if len(x) < FEWEST else statistics.mean_interval(x)

    @property
    def sd(self) -> float:
        """The standard deviation of one seed."""
        if self.paired:
            return float(self.values.std(ddof=1))
        return math.hypot(*(w * x.std(ddof=1) for w, x in zip(self.weights, self.apart, strict=True)))

    def p(self, limit: float = 0.0, side: Side = "two-sided", family: int = 1, level: float = LEVEL) -> float:
        """Return the p-value against a limit (see `statistics.p_value`)."""
        if self.paired:
            return statistics.p_value(self.values, limit, side, family, level)
        return statistics.unpaired(self.apart, self.weights, limit, side)[1]

    def unsure(self, side: Side, family: int, level: float) -> bool:
        """Return whether a t test cannot decide for a side, and the sign-flip test cannot either.

        A t test is wrong too often if it calls a cell better in which runs collapse now and then. If it calls
        such a cell worse, it is wrong less often than `level` (simulated in the tests).
        """
        unable = not self.paired or statistics.smallest_p(self.seeds) * family > level
        return unable and (side in self.doubtful if side != "two-sided" else bool(self.doubtful))

    def __neg__(self) -> Contrast:
        doubtful = [_OTHER[side] for side in self.doubtful]
        return replace(self, weights=[-weight for weight in self.weights], doubtful=doubtful)


class Results:
    """The rows of a study.

    Args:
        spec: the study.
        rows: its rows; rows of tuning and of cells that are not in the grids are not used.
        included: the rows of each study of `spec.include`, in the same order. All rows of a cell are of one
            study, complete or not: of this one if its grids have the cell, else of the first one with it.

    Attributes:
        cells: the rows of tables by cell and seed; runs that failed are not among them.
        failed: the rows of runs that failed.
        level: the probability of a false statement at one of the looks of the study.
        expected: number of runs of the own grids.
        missing: how many of these have no row.
    """

    def __init__(self, spec: Spec, rows: Iterable[Row], included: Sequence[Iterable[Row]] = ()) -> None:
        self.spec = spec
        self.cells: dict[Cell, dict[int, Row]] = {}
        self.failed: list[Row] = []
        self.level = LEVEL / spec.looks
        self.lacking: Counter[Cell] = Counter()  # how many runs of a cell failed
        self.seeds: dict[Cell, int] = {}  # how many seeds a complete cell has
        own = cells(spec)
        self.expected = len(own) * len(spec.seeds)
        self._add(spec, own, (row for row in rows if row.seed in spec.seeds), {})
        self.missing = self.expected - sum(map(len, self.cells.values())) - len(self.failed)
        for each, found in zip(spec.include, included, strict=False):
            self._add(each.spec, cells(each.spec, each.grids), found, each.levels)

    @classmethod
    def read(cls, spec: Spec) -> Results:
        """Return the results in the files of a study and of those that it includes.

        Raises:
            UserError: a line of a file is not a row.
        """
        return cls(spec, read_rows(spec.rows), [read_rows(each.spec.rows) for each in spec.include])

    def _add(self, spec: Spec, wanted: Iterable[Cell], rows: Iterable[Row], more: Mapping[str, str]) -> None:
        """Add the rows of some cells of a study; `more`: values of axes that the study lacks."""
        own = {
            cell: cell_of(self.spec, cell.task, cell.method, {**dict(cell.levels), **more})
            for cell in wanted
            if cell.task in self.spec.tasks and cell.method in self.spec.methods
        }
        own = {cell: shown for cell, shown in own.items() if shown not in self.seeds}
        self.seeds |= dict.fromkeys(own.values(), len(spec.seeds))
        for row in rows:
            cell = cell_of(spec, row.task, row.method, row.levels)
            if row.part != TABLE or cell not in own or not row.levels.keys() <= spec.axes.keys():
                continue
            if row.status == FAILED:
                self.failed.append(row)
                self.lacking[own[cell]] += 1
            else:
                self.cells.setdefault(own[cell], {}).setdefault(row.seed, row)

    @property
    def rows(self) -> list[Row]:
        """All rows of tables."""
        return [row for found in self.cells.values() for row in found.values()]

    def measured(self, cell: Cell, quantity: str) -> dict[int, float]:
        """Return value, at_kl, at_time, collapsed or a metric of each seed of a cell that has it."""
        task, exact = self.spec.tasks[cell.task], self.spec.interval != "percentile"
        rows = sorted(self.cells.get(cell, {}).items())
        found = ((seed, _measured(row, task, quantity, exact)) for seed, row in rows)
        return {seed: value for seed, value in found if value is not None}

    def collapsed(self, cell: Cell) -> int:
        """Return the number of collapsed runs of a cell."""
        return int(sum(self.measured(cell, COLLAPSED).values()))

    def terms(self, quantity: str, cell: Cell, axis: str = "") -> list[Term]:
        """Return a quantity of tables, a slope or a metric as a sum of cells; `axis`: of loss or slope."""
        if quantity == LOSS:
            base = cell.at({axis: self.spec.axes[axis].bases[cell.task]})
            sign = self.spec.tasks[cell.task].sign
            return [Term(sign, base, VALUE), Term(-sign, cell, VALUE)]
        if quantity == SLOPE:
            levels = list(self.spec.axes[axis].values)
            x = np.log2(np.asarray(levels, float))
            weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
            return [Term(w, cell.at({axis: level}), VALUE) for w, level in zip(weights, levels, strict=True)]
        return [Term(1.0, cell, quantity)]

    def contrast(self, terms: Sequence[Term]) -> Contrast:
        """Return a weighted sum of cells; it is paired if the seeds have equal models and machine classes."""
        found = [self.measured(term.cell, term.quantity) for term in terms]
        seeds = sorted({seed for values in found for seed in values})
        samples = np.array([[values.get(seed, math.nan) for seed in seeds] for values in found])
        rows = [self.cells.get(term.cell, {}) for term in terms]
        paired = all(
            len({(each[seed].task, each[seed].machine, *sorted(each[seed].models.items())) for each in rows})
            == len({term.cell.task for term in terms})
            for seed in set.intersection(*map(set, found))
        )
        fallen = {term.cell: self.collapsed(term.cell) for term in terms}
        doubtful: set[Side] = set()
        for weight, cell, quantity in (term for term in terms if fallen[term.cell]):
            known = quantity in (VALUE, AT_KL, AT_TIME)  # in which direction the quantity is better
            up = weight * self.spec.tasks[cell.task].sign > 0
            doubtful |= {"greater" if up else "less"} if known else {"greater", "less"}
        weights = [term.weight for term in terms]
        return Contrast(samples, weights, paired, sum(fallen.values()), doubtful)

    def complete(self, terms: Iterable[Term]) -> bool:
        """Return whether all seeds of the cells have values."""
        return all(len(self.measured(t.cell, t.quantity)) >= self.seeds.get(t.cell, 1) for t in terms)

    def table(self, cell: Cell) -> np.ndarray | None:
        """Return the values [methods, seeds] of the column of a cell; None if values are missing."""
        column = self.contrast([Term(1.0, cell.at({}, method), VALUE) for method in self.spec.methods])
        whole = ~np.isnan(column.samples).any(axis=0)
        few = min(map(len, column.apart)) < len(self.spec.seeds) or sum(whole) < 2
        return None if few else column.samples[:, whole]


def _measured(row: Row, task: Task, quantity: str, exact: bool) -> float | None:
    """Return a quantity of a run; None if the run does not have it."""
    metric = task.metric or row.metric
    if quantity == COLLAPSED:
        values = [task.sign * value for value in row.evaluations.get(metric, ()) if value is not None]
        fallen = bool(values) and values[-1] <= max(values) - task.fall + 1e-9
        return float(row.status == DIVERGED or fallen)
    if quantity in (AT_KL, AT_TIME):
        names, x, power = (
            (("eval/kl", "eval/gold_score"), task.at_kl, 0.5)
            if quantity == AT_KL
            else (("rollouts/time_s", metric), task.at_time, 1.0)
        )
        points = (row.evaluations.get(name, ()) for name in names)
        return None if x is None else _value_at(zip(*points, strict=False), x, power)
    if quantity == START:
        first = [row.evaluations.get(name, ()) for name in ("update", metric)]
        return first[1][0] if all(first) and first[0][0] == 0 else None
    if quantity != VALUE:
        return row.metrics.get(quantity, row.means.get(quantity))
    value = task.worst if row.status == DIVERGED else row.metrics.get(metric)
    if value is not None and exact and row.prompts:
        # Early rows have six decimals, whose rounding would be a spread of equal differences: a rate is a
        # multiple of half a prompt (a tie).
        rate = round(value * 2 * row.prompts) / (2 * row.prompts)
        return rate if abs(rate - value) < 1e-6 else value
    return value


def _value_at(points: Iterable[tuple[float | None, float | None]], at: float, power: float) -> float | None:
    """Return y at a value of x, interpolated where x first rises to it; None if x stays below.

    The interpolation is linear in x to the `power`. Gold scores are close to linear in the square root of the
    KL while they rise (Gao et al., 2210.10760). `points`: (x, y) of the evaluations in the order of updates.
    """
    known = [(x, y) for x, y in points if x is not None and y is not None]
    for (before, low), (after, high) in zip(known, known[1:], strict=False):
        if before <= at <= after and before < after:
            start, end = max(0.0, before) ** power, after**power
            return low + (high - low) * (at**power - start) / (end - start)
    return None
