"""The runs of each part of the study, and the CPU time that missing runs are expected to need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.atlas import rates as learning_rates
from benchmarks.atlas.design import Cell, Design, Run
from benchmarks.atlas.rates import Rates
from benchmarks.atlas.record import FAILED, FINISHED, Row
from rlhf.checks.check import problems
from rlhf.checks.composing import composed
from rlhf.core.errors import UserError

FIGURES = ("lag", "minibatches", "scale")  # parts whose runs are in the figures
PARTS = ("tuning", *FIGURES, "collapse")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The runs that a command selects; None selects all.

    Attributes:
        parts: names of `PARTS`.
        tasks: names of tasks.
        methods: names of methods.
        lags: lags; of the part `minibatches`, only cells with lag 0 exist.
        seeds: seeds of the runs in the figures; the runs of other parts keep their own seeds.
    """

    parts: Sequence[str] = PARTS
    tasks: Sequence[str] | None = None
    methods: Sequence[str] | None = None
    lags: Sequence[int] | None = None
    seeds: Sequence[int] | None = None

    def has(self, cell: Cell) -> bool:
        """Return whether the selection includes the task, method and lag of a cell."""
        chosen = ((self.tasks, cell.task), (self.methods, cell.method), (self.lags, cell.lag))
        return all(values is None or value in values for values, value in chosen)


def cells(design: Design, part: str) -> Iterator[Cell]:
    """Yield the cells of a part of `FIGURES`. A cell with lag 0 and N 1 is in two parts."""
    if part == "scale":
        yield from scale_cells(design)
        return
    for task in design.tasks:
        for method in design.methods:
            if part == "lag":
                yield from (design.cell(task, method, lag=lag) for lag in design.lags)
            else:
                yield from (design.cell(task, method, minibatches=n) for n in design.minibatches)


def scale_cells(design: Design) -> Iterator[Cell]:
    """Yield the cells with another K or another width, and the same rates as the cells of the other parts."""
    for method in design.scale_methods:
        for lag in design.scale_lags:
            cell = design.cell(design.scale_task, method, lag)
            yield cell
            yield from (cell._replace(samples=k) for k in design.scale_samples)
            yield from (cell._replace(width=width) for width in design.scale_widths)


def runs(design: Design, selection: Selection, rates: Rates) -> list[Run]:
    """Return the selected runs without duplicates: tuning first, then the figures seed by seed, so that a
    partial study has all cells with few seeds; last the runs that are made to collapse.
    """
    found: list[Run] = []
    if "tuning" in selection.parts:
        for task in design.tasks:
            for method in design.methods:
                for lag in design.tuning_lags:
                    if selection.has(design.cell(task, method, lag)):
                        found += learning_rates.tuning_runs(design, task, method, lag)
    for seed in design.seeds:
        if selection.seeds is None or seed in selection.seeds:
            for part in FIGURES:
                if part in selection.parts:
                    found += [
                        Run(cell, seed, learning_rates.rate(design, rates, cell))
                        for cell in cells(design, part)
                        if selection.has(cell)
                    ]
    if "collapse" in selection.parts:
        found += [run for run in collapse_runs(design) if selection.has(run.cell)]
    return list(dict.fromkeys(found))


def collapse_runs(design: Design) -> Iterator[Run]:
    """Yield the runs with a learning rate that is too large."""
    for seed in design.collapse_seeds:
        for task in design.tasks:
            for method in design.methods:
                for lag in design.collapse_lags:
                    yield Run(design.cell(task, method, lag), seed, design.collapse_rate)


def missing(design: Design, wanted: Sequence[Run], rows: Mapping[str, Row]) -> list[Run]:
    """Return the runs that can start and have no row, or the row of a failure that a repetition may avoid."""
    ready = [run for run in wanted if run.rate is not None]
    found = {run: rows.get(design.key(run)) for run in ready}
    return [run for run, row in found.items() if row is None or row.status == FAILED]


def expected_s(design: Design, runs: Sequence[Run], rows: Sequence[Row]) -> float:
    """Return the expected CPU seconds of runs: means of the cell, method or task, or `Task.cpu_s`."""
    seconds: dict[object, list[float]] = {}
    for row in rows:
        if row.status == FINISHED:
            for key in (row.cell, (row.task, row.method), row.task):
                seconds.setdefault(key, []).append(row.cpu_s)
    means = {key: mean(values) for key, values in seconds.items()}
    total = 0.0
    for run in runs:
        keys = (run.cell, (run.cell.task, run.cell.method), run.cell.task)
        total += next((means[key] for key in keys if key in means), design.tasks[run.cell.task].cpu_s)
    return total


def refused(design: Design, methods: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return the problems of each method whose runs would be refused at the largest lag, by method."""
    found: dict[str, list[str]] = {}
    for method in methods or design.methods:
        texts: list[str] = []
        for task in design.tasks:
            cell = design.cell(task, method, max(design.lags))
            overrides = design.overrides_of(Run(cell, design.seeds[0], design.rates[0]))
            try:
                texts += problems(composed(overrides))
            except UserError as error:
                texts += error.problems
        if texts:
            found[method] = list(dict.fromkeys(texts))
    return found
