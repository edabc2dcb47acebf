"""How much each method loses on old samples: methods x lag and methods x N on two tasks, with five seeds.

    make atlas                                 carry out what is missing, then write tables and figure
    make atlas ARGS=--plan                     print the runs and their expected CPU time, start nothing
    make atlas ARGS=--draw                     write tables and figure from the runs that exist
    make atlas ARGS=--smoke                    a tiny study in outputs/atlas_smoke, in a few minutes
    make atlas ARGS="--part tuning"            only the runs that choose the learning rates
    make atlas ARGS="--cell ppo:tldr_mini:64:3"  repeat a run and compare its values with the file of results
    make atlas ARGS="--cell dpo:tldr_mini:64:3:K=4"            the same for a run with another K
    make atlas ARGS="--cell ppo:arithmetic:16:101:rate=3e-05"  the same for a run that chooses learning rates

The command can be stopped with Ctrl-C or SIGTERM at any time; the same command continues.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.atlas import page, plan, rates, record, rerun
from benchmarks.atlas.design import SMOKE, STUDY, Design
from benchmarks.atlas.executor import execute
from benchmarks.atlas.plan import PARTS, Selection
from benchmarks.atlas.study import Study
from rlhf.checks.check import refuse
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.runs.lock import claimed
from rlhf.study.page import fill


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("make atlas", description=__doc__, formatter_class=form)
    parser.add_argument("--plan", action="store_true", help="print the runs and their expected CPU time")
    parser.add_argument("--draw", action="store_true", help="start no run, use the runs that exist")
    parser.add_argument("--smoke", action="store_true", help="a tiny study in outputs/atlas_smoke")
    parser.add_argument("--cell", metavar="RUN", help=f"repeat one run: {rerun.FORM}")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1, help="processes (default 1)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="parts of the study")
    parser.add_argument("--task", nargs="+", help="tasks of the study")
    parser.add_argument("--method", nargs="+", help="methods of the study")
    parser.add_argument("--lag", nargs="+", type=int, help="lags; runs with N above 1 have lag 0")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds of the runs in the figures")
    given = parser.parse_args(args)
    design = SMOKE if given.smoke else STUDY
    try:
        selection = Selection(
            parts=given.part,
            tasks=among(given.task, design.tasks, "--task"),
            methods=among(given.method, design.methods, "--method"),
            lags=among(given.lag, design.lags, "--lag"),
            seeds=among(given.seeds, design.seeds, "--seeds"),
        )
        if given.cell:
            repeat(design, given.cell)
        elif given.plan:
            print(described(design, selection))
        else:
            if not given.draw:
                carry_out(design, selection, given.workers)
            draw(design)
    except UserError as error:
        refuse(error.problems)


def among(given: Sequence | None, known: Sequence, name: str) -> Sequence | None:
    """Return the values of an argument.

    Raises:
        UserError: the study does not have one of the values.
    """
    if unknown := [value for value in given or () if value not in known]:
        choices = " ".join(map(str, known))
        raise UserError(
            f"{name} must name values of the study ({choices}), got {unknown[0]}; set {name} {choices}"
        )
    return given


def carry_out(design: Design, selection: Selection, workers: int) -> None:
    """Carry out the missing runs of a selection: first those of the learning rates, then the others.

    Raises:
        UserError: the settings of a selected method would be refused, or another command runs the study.
    """
    if refused := plan.refused(design, selection.methods):
        valid = [name for name in selection.methods or design.methods if name not in refused]
        remedy = f"set --method {' '.join(valid)}" if valid else "repair the settings above"
        raise UserError(
            *(f"method {method}: {text}" for method, texts in refused.items() for text in texts),
            f"--method must name methods whose settings are valid, got {', '.join(refused)}; {remedy}",
        )
    with claimed(design.outputs):
        rows = record.read(design.results)
        for parts in (("tuning",), PARTS[1:]):
            wanted = plan.runs(
                design,
                Selection(**{**vars_of(selection), "parts": [p for p in parts if p in selection.parts]}),
                rates.read(design),
            )
            execute(design, plan.missing(design, wanted, rows), rows, workers)
            rates.write(design, rates.choose(design, rows))
        waiting = sum(run.rate is None for run in wanted)
        if waiting:
            print(f"{waiting} runs have no learning rate yet; run: make atlas ARGS='--part tuning'")


def vars_of(selection: Selection) -> dict:
    """Return the fields of a selection."""
    return {name: getattr(selection, name) for name in Selection.__dataclass_fields__}


def described(design: Design, selection: Selection) -> str:
    """Return the runs of each part and task, with those that are missing and their expected CPU-hours."""
    rows, chosen = record.read(design.results), rates.read(design)
    lines, seen, total = [], set(), 0.0
    for part in selection.parts:
        for task in design.tasks:
            only = Selection(**{**vars_of(selection), "parts": [part]})
            wanted = [run for run in plan.runs(design, only, chosen) if run.cell.task == task]
            own = [run for run in wanted if run not in seen]
            seen.update(own)
            left = [run for run in own if run.rate is None] + plan.missing(design, own, rows)
            hours = plan.expected_s(design, left, list(rows.values())) / 3600
            total += hours
            lines.append(
                [part, task, str(len(own)), str(len(own) - len(left)), str(len(left)), f"{hours:.1f}"]
            )
    lines.append(["all", "", str(len(seen)), "", "", f"{total:.1f}"])
    text = page.table(["part", "task", "runs", "done", "missing", "CPU-hours to do"], lines, left=2)
    refused = plan.refused(design, selection.methods)
    return "\n".join([text, *(f"refused: {name}: {texts[0]}" for name, texts in refused.items())])


def repeat(design: Design, cell: str) -> None:
    """Repeat a run and print whether its values are those of the file of results; else exit with code 1."""
    differences = rerun.repeat(design, record.read(design.results), rates.read(design), cell)
    for line in differences:
        print(line)
    if differences:
        sys.exit(1)
    print(f"{cell}: all values are equal")


def draw(design: Design) -> None:
    """Write the generated part of the page, the file of all tables, and the figure."""
    from benchmarks.atlas import figure

    study = Study(design, record.read(design.results), rates.read(design))
    figure_path, tables = (
        Path(os.path.relpath(file, design.document.parent)).as_posix()
        for file in (design.figure, design.tables)
    )
    if not design.document.exists():
        design.document.parent.mkdir(parents=True, exist_ok=True)
        design.document.write_text("\n".join(["# Atlas", "", *page.MARKS, ""]), encoding="utf-8")
    document = design.document.read_text(encoding="utf-8")
    write_atomically(design.document, fill(document, page.MARKS, page.written(study, figure_path, tables)))
    write_atomically(design.tables, page.all_tables(study))
    design.figure.parent.mkdir(parents=True, exist_ok=True)
    design.figure.write_bytes(figure.png(study))
    print(page.about(study))
    print(f"{design.document}\n{design.tables}\n{design.figure}")


if __name__ == "__main__":
    main()
