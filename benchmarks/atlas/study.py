"""The runs of a design as values per cell and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.atlas import analysis, plan
from benchmarks.atlas.design import Cell, Design
from benchmarks.atlas.rates import Rates
from benchmarks.atlas.record import Row

ON_POLICY = {"lag": 0, "minibatches": 1}


class Study:
    """The rows of the runs in the figures, with the learning rates that are chosen.

    Args:
        design: the study.
        rows: all rows, by `Row.run`. Rows of other learning rates and seeds are not used.
        rates: the chosen learning rates.
    """

    def __init__(self, design: Design, rows: Mapping[str, Row], rates: Rates) -> None:
        self.design = design
        self.rates = rates
        self.wanted = plan.runs(design, plan.Selection(parts=plan.FIGURES), rates)
        self.cells: dict[Cell, dict[int, Row]] = {}
        for run in self.wanted:
            if run.rate is not None and (row := rows.get(design.key(run))) is not None:
                self.cells.setdefault(run.cell, {})[run.seed] = row
        self.tuned = [
            row
            for run in plan.runs(design, plan.Selection(parts=("tuning",)), rates)
            if (row := rows.get(design.key(run))) is not None
        ]

    @property
    def rows(self) -> list[Row]:
        """All rows of the figures."""
        return [row for found in self.cells.values() for row in found.values()]

    def of(self, cell: Cell) -> dict[int, Row]:
        """Return the rows of a cell by seed."""
        return self.cells.get(cell, {})

    def values(self, cell: Cell) -> dict[int, float]:
        """Return the final win rate or accuracy of each seed; 0 for runs that diverged or failed.

        The file has six decimals; their rounding would be a spread of equal differences.
        """
        step = self.design.resolution / 2  # a tie of the win rate is half a prompt
        return {seed: round(row.result / step) * step for seed, row in self.of(cell).items()}

    def losses(self, cell: Cell) -> dict[int, float]:
        """Return what each seed loses: its value with lag 0 and N 1, minus its value in the cell."""
        own, base = self.values(cell), self.values(cell._replace(**ON_POLICY))
        return {seed: base[seed] - own[seed] for seed in sorted(own.keys() & base.keys())}

    def table(self, cells: Sequence[Cell]) -> np.ndarray | None:
        """Return the values [cells, seeds]; None if a run is missing."""
        found = [self.values(cell) for cell in cells]
        if any(len(values) < len(self.design.seeds) for values in found):
            return None
        return np.array([[values[seed] for seed in self.design.seeds] for values in found])

    def at_kl(self, cell: Cell) -> dict[int, float]:
        """Return the gold score of each seed at the KL of the task, for the seeds that reach it."""
        kl = self.design.tasks[cell.task].kl
        found = {}
        for seed, row in self.of(cell).items():
            value = analysis.at_kl([(each[1], each[3]) for each in row.evaluations], kl)
            if value is not None:
                found[seed] = value
        return found

    def collapsed(self, cell: Cell) -> int:
        """Return the number of collapsed runs of a cell."""
        return sum(row.collapsed for row in self.of(cell).values())
