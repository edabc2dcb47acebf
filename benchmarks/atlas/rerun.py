"""One run again, in a temporary folder, compared with its row in the file of results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.atlas.design import Cell, Design
from benchmarks.atlas.executor import ENVIRONMENT
from benchmarks.atlas.record import Row
from benchmarks.atlas.study import Study
from rlhf.core.errors import UserError

FORM = "method:task:lag:seed, or method:task:N16:seed for N = 16"


def parse(design: Design, text: str) -> tuple[Cell, int]:
    """Return the cell and the seed of an argument such as ppo:tldr_mini:64:3.

    Raises:
        UserError: the argument has another form, or the study has no such method, task, lag or N.
    """
    parts = text.split(":")
    example = next(iter(design.methods)), next(iter(design.tasks)), str(max(design.lags)), "1"
    remedy = f"set --cell {':'.join(example)}"
    if len(parts) != 4 or not parts[3].isdecimal() or not parts[2].removeprefix("N").isdecimal():
        raise UserError(f"--cell must be {FORM} (it names one run), got {text!r}; {remedy}")
    method, task, at, seed = parts
    value = int(at.removeprefix("N"))
    for name, given, known in (
        ("a method", method, design.methods),
        ("a task", task, design.tasks),
        ("N", value, design.minibatches) if at.startswith("N") else ("a lag", value, design.lags),
        ("a seed", int(seed), design.seeds),
    ):
        if given not in known:
            choices = ", ".join(map(str, known))
            raise UserError(f"--cell must have {name} of the study ({choices}), got {given!r}; {remedy}")
    fields = {"minibatches": value} if at.startswith("N") else {"lag": value}
    return design.cell(task, method, **fields), int(seed)


def repeat(design: Design, rows: Mapping[str, Row], study: Study, text: str) -> list[str]:
    """Carry out a run again and return the differences from its row: none if all values are equal.

    The models that all runs share are taken from `Design.outputs`, or made there first.

    Raises:
        UserError: the file of results has no row of the run.
    """
    cell, seed = parse(design, text)
    key = study.key(cell, seed)
    if key is None or key not in rows:
        raise UserError(
            f"--cell must name a run with a row in {design.results} (its values are compared), got {text!r}; "
            "run: make atlas"
        )
    os.environ.update(ENVIRONMENT)
    from benchmarks.atlas import worker
    from benchmarks.atlas.design import Run

    with tempfile.TemporaryDirectory() as folder:
        made = worker.carry_out(design, Run(cell, seed, study.rate(cell)), Path(folder) / "run")
    before, after = rows[key].measured(), made.measured()
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
