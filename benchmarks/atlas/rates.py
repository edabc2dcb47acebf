"""The choice of learning rates: per task, method and lag, from runs with seeds that the figures do not use.

The rate with the highest mean final value (win rate or accuracy) over the tuning seeds is chosen; among equal
rates, the smallest. A run that diverged or failed counts as 0. The choice and its values are written to a
JSON file, and the runs of the figures read the file:

    {task: {method: {lag: {"chosen": rate, "values": {rate: [value of each seed]}}}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import mean
from typing import Any

from benchmarks.atlas.design import Cell, Design, Run
from benchmarks.atlas.record import Row
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically

Rates = dict[str, dict[str, dict[str, dict[str, Any]]]]


def tuning_runs(design: Design, task: str, method: str, lag: int) -> list[Run]:
    """Return the runs from which one learning rate is chosen."""
    cell = design.cell(task, method, lag)
    return [Run(cell, seed, rate) for rate in design.rates for seed in design.tuning_seeds]


def choose(design: Design, rows: Mapping[str, Row]) -> Rates:
    """Return the chosen rates, without those whose runs are incomplete."""
    chosen: Rates = {}
    for task in design.tasks:
        for method in design.methods:
            for lag in design.tuning_lags:
                runs = tuning_runs(design, task, method, lag)
                found = [rows.get(design.key(run)) for run in runs]
                if any(row is None for row in found):
                    continue
                values: dict[str, list[float]] = {}
                for run, row in zip(runs, found, strict=True):
                    values.setdefault(f"{run.rate:g}", []).append(row.result if row else 0.0)
                best = max(values, key=lambda rate: (mean(values[rate]), -float(rate)))
                entry = {"chosen": float(best), "values": values}
                chosen.setdefault(task, {}).setdefault(method, {})[str(lag)] = entry
    return chosen


def rate(design: Design, rates: Rates, cell: Cell) -> float | None:
    """Return the learning rate of a cell; None if it is not chosen yet."""
    low, high = design.tuning_lags
    lag = high if max(cell.lag, cell.minibatches) >= LARGE else low
    entry = rates.get(cell.task, {}).get(cell.method, {}).get(str(lag))
    return None if entry is None else float(entry["chosen"])


LARGE = 4  # from this lag or N on, a cell uses the rate of the larger tuning lag


def write(design: Design, rates: Rates) -> None:
    """Write the chosen rates."""
    design.chosen.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(design.chosen, json.dumps(rates, indent=1) + "\n")


def read(design: Design) -> Rates:
    """Return the chosen rates; none if the file does not exist.

    Raises:
        UserError: the file is not valid JSON.
    """
    if not design.chosen.exists():
        return {}
    try:
        found: Rates = json.loads(design.chosen.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{design.chosen} must be the JSON file of chosen learning rates, got {error}; delete the file, "
            "then run: make atlas ARGS='--part tuning'"
        ) from error
    return found
