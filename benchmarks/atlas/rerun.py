"""One run again, in a temporary folder, compared with its row in the file of results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.atlas import plan
from benchmarks.atlas.design import Cell, Design, Run
from benchmarks.atlas.executor import ENVIRONMENT
from benchmarks.atlas.rates import Rates
from benchmarks.atlas.record import Row
from rlhf.core.errors import UserError

FORM = (
    "method:task:lag:seed, or method:task:N16:seed for N = 16; "
    "then :K=4, :width=64 or :rate=0.001 for a run with another K, hidden size or learning rate"
)
OPTIONS = {"K": int, "width": int, "rate": float}


def parse(design: Design, rates: Rates, text: str) -> Run:
    """Return the run that an argument such as ppo:tldr_mini:64:3 or ppo:tldr_mini:64:3:K=4 names.

    Without K and width, the run has the K of its task and the default hidden size. Without rate, the run has
    the only learning rate of the study for its cell and seed.

    Raises:
        UserError: the argument has another form, or the study has no such run.
    """
    parts = text.split(":")
    example = next(iter(design.methods)), next(iter(design.tasks)), str(max(design.lags)), "1"
    remedy = f"set --cell {':'.join(example)}"
    options = dict(part.partition("=")[::2] for part in parts[4:])
    try:
        method, task, at, seed = parts[:4]
        level, number = int(at.removeprefix("N")), int(seed)
        given = {name: OPTIONS[name](value) for name, value in options.items()}
    except (ValueError, KeyError):
        raise UserError(f"--cell must be {FORM} (it names one run), got {text!r}; {remedy}") from None
    for name, value, known in (
        ("a method", method, design.methods),
        ("a task", task, design.tasks),
        ("N", level, design.minibatches) if at.startswith("N") else ("a lag", level, design.lags),
        ("a seed", number, [*design.seeds, *design.tuning_seeds, *design.collapse_seeds]),
    ):
        if value not in known:
            choices = ", ".join(map(str, known))
            raise UserError(f"--cell must have {name} of the study ({choices}), got {value!r}; {remedy}")
    cell = design.cell(task, method, **({"minibatches": level} if at.startswith("N") else {"lag": level}))
    cell = cell._replace(samples=given.get("K", cell.samples), width=given.get("width", cell.width))
    runs = plan.runs(design, plan.Selection(tasks=[task], methods=[method]), rates)
    runs = [run for run in runs if run.seed == number]
    alike = [run for run in runs if run.cell == cell]
    found = [run for run in alike if given.get("rate", run.rate) == run.rate]
    if len(found) != 1:
        names = " ".join(name_of(design, run) for run in found or alike or runs)
        rule = "have one learning rate of its cell" if alike else "name a run of the study"
        raise UserError(f"--cell must {rule}, got {text!r}; set --cell to one of: {names}")
    return found[0]


def name_of(design: Design, run: Run) -> str:
    """Return the argument of `--cell` that names a run."""
    cell = run.cell
    parts = [
        *(cell.method, cell.task, f"N{cell.minibatches}" if cell.minibatches > 1 else str(cell.lag)),
        str(run.seed),
        *([f"K={cell.samples}"] if cell.samples != design.tasks[cell.task].samples else []),
        *([f"width={cell.width}"] if cell.width != Cell._field_defaults["width"] else []),
        *([] if run.rate is None else [f"rate={run.rate:g}"]),
    ]
    return ":".join(parts)


def repeat(design: Design, rows: Mapping[str, Row], rates: Rates, text: str) -> list[str]:
    """Carry out a run again and return the differences from its row: none if all values are equal.

    The models that all runs share are taken from `Design.outputs`, or made there first.

    Raises:
        UserError: the study has no such run, or the file of results has no row of the run.
    """
    run = parse(design, rates, text)
    key = None if run.rate is None else design.key(run)
    if key is None or key not in rows:
        raise UserError(
            f"--cell must name a run with a row in {design.results} (its values are compared), got {text!r}; "
            "run: make atlas"
        )
    os.environ.update(ENVIRONMENT)
    from benchmarks.atlas import worker

    with tempfile.TemporaryDirectory() as folder:
        made = worker.carry_out(design, run, Path(folder) / "run")
    before, after = rows[key].measured(), made.measured()
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
