"""The rows of a study as values per cell and seed, and sums of cells with intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhf.core import statistics
from rlhf.core.statistics import Estimate
from rlhf.study.cells import Cell, cell_of, cells
from rlhf.study.formula import SLOPE
from rlhf.study.rows import DIVERGED, FAILED, TABLE, Row, read_rows
from rlhf.study.spec import AT_KL, COLLAPSED, LOSS, VALUE, Spec, Task

FEWEST = 3  # seeds without which nothing is stated


class Term(NamedTuple):
    """A part of a sum: a weight, a cell, and what is measured: value, at_kl, collapsed or a metric."""

    weight: float
    cell: Cell
    quantity: str


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of cells, such as a difference or a slope."""

    samples: Sequence[Mapping[int, float]]  # the values of each cell, by seed
    weights: Sequence[float]
    paired: bool  # whether the seeds of the cells share models and machine; else means are compared
    collapsed: int  # number of collapsed runs in the cells

    @cached_property
    def values(self) -> np.ndarray:
        """The sum within each seed that all cells have."""
        seeds = sorted(set.intersection(*(set(sample) for sample in self.samples)))
        rows = [[sample[seed] for sample in self.samples] for seed in seeds]
        return np.asarray(rows, float).reshape(len(seeds), len(self.samples)) @ np.asarray(self.weights)

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.values) if self.paired else min(map(len, self.samples))

    @property
    def all_values(self) -> np.ndarray:
        """All values: equal methods have equal ones."""
        return np.concatenate([[*sample.values()] for sample in self.samples])

    @cached_property
    def estimate(self) -> Estimate:
        """The mean with its 95 % t interval; of fewer than `FEWEST` seeds with minimum and maximum."""
        if not self.seeds:
            return Estimate(math.nan, math.nan, math.nan, 0)
        if self.paired and self.seeds < FEWEST:
            x = self.values
            return Estimate(float(x.mean()), float(x.min()), float(x.max()), len(x))
        return statistics.mean_interval(self.values) if self.paired else self._apart()[0]

    def _apart(self, limit: float = 0.0, side: statistics.Side = "two-sided") -> tuple[Estimate, float]:
        samples = [[*sample.values()] for sample in self.samples]
        return statistics.unpaired(samples, self.weights, limit, side)

    @property
    def sd(self) -> float:
        """The standard deviation of one seed."""
        if self.paired:
            return float(self.values.std(ddof=1))
        spreads = (w * np.std([*x.values()], ddof=1) for x, w in zip(self.samples, self.weights, strict=True))
        return math.hypot(*spreads)

    def p(self, limit: float = 0.0, side: statistics.Side = "two-sided", family: int = 1) -> float:
        """Return the p-value against a limit (see `statistics.p_value`)."""
        if self.paired:
            return statistics.p_value(self.values, limit, side, family)
        return self._apart(limit, side)[1]

    def undecidable(self, family: int, level: float) -> bool:
        """Return whether a run collapsed and the sign-flip test, which alone covers that, cannot decide."""
        unable = not self.paired or statistics.smallest_p(self.seeds) * family > level
        return bool(self.collapsed) and unable

    def __neg__(self) -> Contrast:
        return Contrast(self.samples, [-weight for weight in self.weights], self.paired, self.collapsed)


class Results:
    """The rows of a study.

    Args:
        spec: the study.
        rows: its rows; rows of tuning and of cells that are not in the grids are not used.
        included: the rows of each study of `spec.include`, in the same order.

    Attributes:
        cells: the rows of tables by cell and seed; runs that failed are not among them.
        failed: the rows of runs that failed.
        expected: number of runs of the own grids.
        missing: how many of these have no row.
    """

    def __init__(self, spec: Spec, rows: Iterable[Row], included: Sequence[Iterable[Row]] = ()) -> None:
        self.spec = spec
        self.cells: dict[Cell, dict[int, Row]] = {}
        self.failed: list[Row] = []
        self.seeds: dict[Cell, int] = {}  # how many seeds a complete cell has
        own = cells(spec)
        self.expected = len(own) * len(spec.seeds)
        self._add(spec, own, [row for row in rows if row.seed in spec.seeds], {})
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
        own = {}
        for cell in wanted:
            if cell.task in self.spec.tasks and cell.method in self.spec.methods:
                own[cell] = cell_of(self.spec, cell.task, cell.method, {**dict(cell.levels), **more})
                self.seeds.setdefault(own[cell], len(spec.seeds))
        for row in rows:
            cell = cell_of(spec, row.task, row.method, row.levels)
            if row.part != TABLE or cell not in own or not row.levels.keys() <= spec.axes.keys():
                continue
            if row.status == FAILED:
                self.failed.append(row)
            else:
                self.cells.setdefault(own[cell], {}).setdefault(row.seed, row)

    @property
    def rows(self) -> list[Row]:
        """All rows of tables."""
        return [row for found in self.cells.values() for row in found.values()]

    def measured(self, cell: Cell, quantity: str) -> dict[int, float]:
        """Return value, at_kl, collapsed or a metric of each seed of a cell that has it."""
        task = self.spec.tasks[cell.task]
        rows = self.cells.get(cell, {})
        found = {seed: _measured(rows[seed], task, quantity) for seed in sorted(rows)}
        values = {seed: value for seed, value in found.items() if value is not None}
        if quantity != VALUE or self.spec.interval == "percentile":
            return values
        return {seed: _whole(value, rows[seed].prompts) for seed, value in values.items()}

    def collapsed(self, cell: Cell) -> int:
        """Return the number of collapsed runs of a cell."""
        return int(sum(self.measured(cell, COLLAPSED).values()))

    def terms(self, quantity: str, cell: Cell, axis: str | None) -> list[Term]:
        """Return a quantity as a sum of cells.

        Args:
            quantity: a quantity of tables, `slope`, or a metric.
            cell: the cell.
            axis: the axis of a loss or a slope.
        """
        if quantity == LOSS:
            base = cell.at({str(axis): self.spec.axes[str(axis)].bases[cell.task]})
            return [Term(1.0, base, VALUE), Term(-1.0, cell, VALUE)]
        if quantity == SLOPE:
            levels = list(self.spec.axes[str(axis)].values)
            x = np.log2(np.asarray(levels, float))
            weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
            columns = (cell.at({str(axis): level}) for level in levels)
            return [Term(w, column, VALUE) for w, column in zip(weights, columns, strict=True)]
        return [Term(1.0, cell, quantity)]

    def contrast(self, terms: Sequence[Term]) -> Contrast:
        """Return a weighted sum of cells; it is paired if the seeds have equal models and machine classes."""
        samples = [self.measured(term.cell, term.quantity) for term in terms]
        rows = [self.cells.get(term.cell, {}) for term in terms]
        paired = all(
            len({(found[seed].machine, *sorted(found[seed].models.items())) for found in rows}) == 1
            for seed in set.intersection(*map(set, samples))
        )
        fallen = sum(self.collapsed(cell) for cell in {term.cell for term in terms})
        return Contrast(samples, [term.weight for term in terms], paired, fallen)

    def complete(self, terms: Iterable[Term]) -> bool:
        """Return whether all seeds of the cells have values."""
        return all(len(self.measured(t.cell, t.quantity)) >= self.seeds.get(t.cell, 1) for t in terms)

    def table(self, methods: Iterable[str], cell: Cell) -> np.ndarray | None:
        """Return the values [methods, seeds] of the column of a cell; None if values are missing."""
        found = [self.measured(cell.at({}, method), VALUE) for method in methods]
        seeds = set.intersection(*map(set, found)) if found else set()
        if len(seeds) < 2 or any(len(values) < len(self.spec.seeds) for values in found):
            return None
        return np.array([[values[seed] for seed in sorted(seeds)] for values in found])


def _measured(row: Row, task: Task, quantity: str) -> float | None:
    """Return a quantity of a run; None if the run does not have it."""
    metric = task.metric or row.metric
    if quantity == COLLAPSED:
        values = [value for value in row.evaluations.get(metric, ()) if value is not None]
        fallen = bool(values) and values[-1] <= max(values) - task.fall + 1e-9
        return float(row.status == DIVERGED or fallen)
    if quantity == AT_KL:
        points = zip(
            row.evaluations.get("eval/kl", ()), row.evaluations.get("eval/gold_score", ()), strict=False
        )
        return None if task.at_kl is None else _value_at(list(points), task.at_kl)
    if quantity != VALUE:
        return row.metrics.get(quantity, row.means.get(quantity))
    return task.worst if row.status == DIVERGED else row.metrics.get(metric)


def _whole(value: float, prompts: int) -> float:
    """Return a rate as a multiple of half a prompt (a tie), if it is one with six decimals.

    Early rows have six decimals, whose rounding would be a spread of equal differences.
    """
    halves = round(value * 2 * prompts)
    return halves / (2 * prompts) if prompts and abs(halves / (2 * prompts) - value) < 1e-6 else value


def _value_at(points: Sequence[tuple[float | None, float | None]], kl: float) -> float | None:
    """Return the gold score at a KL, interpolated where the KL first rises to it; None if the KL stays below.

    The interpolation is linear in the square root of the KL, in which gold scores are close to linear while
    they rise (Gao et al., 2210.10760).

    Args:
        points: (KL, gold score) of the evaluations of a run, in the order of updates.
        kl: the KL.
    """
    known = [(x, y) for x, y in points if x is not None and y is not None]
    for (before, low), (after, high) in zip(known, known[1:], strict=False):
        if before <= kl <= after and before < after:
            start, end = math.sqrt(max(0.0, before)), math.sqrt(after)
            return low + (high - low) * (math.sqrt(kl) - start) / (end - start)
    return None
