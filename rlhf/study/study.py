"""Studies in Python, with the methods that are the commands of `rlhf study`.

    from rlhf import Study

    study = Study("studies/staleness.yaml")
    list(study.plan().lines())  # runs by grid and task: done, stale, missing
    study.run(workers=4)
    study.rows()  # a pandas.DataFrame

The errors are those of `rlhf.Experiment`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.suggestions import suggestion
from rlhf.core import files
from rlhf.core.errors import RunError, UserError
from rlhf.processes.signals import interruptible
from rlhf.study import attempt, pricing
from rlhf.study.claims import Judged
from rlhf.study.collection import ROW, Collection
from rlhf.study.formula import quantities, read_table
from rlhf.study.page import verdicts, write_page
from rlhf.study.planning import Configs, Only, Plan
from rlhf.study.reading import read_spec
from rlhf.study.results import Results
from rlhf.study.rows import TABLE, Row, read_rows
from rlhf.study.spec import Spec, Table
from rlhf.study.tables import families, tables
from rlhf.study.workers import run

if TYPE_CHECKING:
    import pandas


class Study:
    """A study that a file declares.

    Args:
        file: the study file, or its content.

    Raises:
        UserError: the file cannot be read or is invalid; the error has all problems, each with its line.
    """

    def __init__(self, file: str | Path | Spec) -> None:
        self.spec = file if isinstance(file, Spec) else read_spec(file)
        self.configs = Configs(self.spec)

    def plan(self, only: Only = None) -> Plan:
        """Return the runs with their states."""
        return Plan(self.spec, Collection(self.spec).rows(), self.configs, only)

    def price(self) -> pricing.Price:
        """Return the price of the missing runs, after a pilot for each distinct cost that has none.

        Raises:
            UserError: a run is invalid, or the price is above `budget`.
            RunError: a pilot failed.
        """
        plan = self.plan()
        plan.check()
        with interruptible():
            return pricing.measured_price(plan)

    def run(
        self,
        workers: int = 1,
        only: Only = None,
        nice: int = 0,
        failed: bool = False,
        slurm: Sequence[str] | None = None,
    ) -> None:
        """Carry out the missing runs; see `rlhf.study.workers.run`."""
        run(self.spec, workers, only, nice, failed, slurm)

    def rows(self) -> pandas.DataFrame:
        """Return the rows, one per run, with columns for axes and metrics of the last evaluation."""
        import pandas

        found = Collection(self.spec).rows()
        return pandas.DataFrame([{**asdict(row), **row.levels, **row.metrics} for row in found])

    def table(self, text: str) -> pandas.DataFrame:
        """Return a table such as "loss over lag", with texts as on the page, by task and method.

        Raises:
            UserError: the study has no such quantity, axis or metric.
        """
        import pandas

        table = read_table(text, quantities(self.spec.tasks), self.spec.axes)
        if not isinstance(table, Table):
            rule, got, remedy = table
            raise UserError(f"a table {rule}, got {got}; {remedy}")
        results = Results.read(self.spec)
        known = {name for row in results.rows for name in (*row.metrics, *row.means)}
        if "/" in table.quantity and table.quantity not in known:
            guess = suggestion(table.quantity, known, "did you mean {}?") or "choose one of Study.rows()"
            raise UserError(f"a table must name a metric of the rows, got {table.quantity}; {guess}")
        found: dict[tuple[str, str], dict[str, str]] = {}
        for each in tables(results, [table]):
            for method, row in each.rows.items():
                texts = [entry.text for entry in row]
                found[each.task, method] = dict(zip(each.columns, texts, strict=True))
        return pandas.DataFrame.from_dict(found, orient="index")

    def claims(self) -> list[Judged]:
        """Return the verdict on each claim, as far as the study is complete."""
        results = Results.read(self.spec)
        return list(verdicts(results, list(families(results))))

    def page(self, final: bool = False, latex: bool = False) -> Path:
        """Write the page, tables and figures (see `rlhf.study.page`), and return the path of the page."""
        write_page(Results.read(self.spec), final=final, latex=latex)
        return self.spec.page

    def repeat(self, where: Mapping[str, str], folder: Path | None = None) -> tuple[Row, Row]:
        """Carry out one run again, and return its row and the new row.

        Args:
            where: a value of "task", "method", axes and "seed", so that one run is left.
            folder: where the new run folder is; None: `repeats` in the folder of the study.

        Raises:
            UserError: several runs or no run have these values, or the run has no row.
            RunError: the run failed.
        """
        plan = self.plan({**{name: [value] for name, value in where.items()}, "part": [TABLE]})
        if len(plan.runs) != 1 or (row := plan.runs[0].row or plan.runs[0].stale) is None:
            got = f"{len(plan.runs)} runs" if len(plan.runs) != 1 else "a run without a row"
            raise UserError(f"repeat must name one run with a row, got {got}; add method=, seed= or others")
        folder = (folder or self.spec.folder / "repeats") / plan.runs[0].folder.name
        again = replace(plan.runs[0], folder=folder)
        files.discard(folder)
        folder.mkdir(parents=True)
        with interruptible():
            code = attempt.wait_for(attempt.fork(plan, again))
        if code or not (rows := read_rows(folder / ROW)):
            raise RunError(f"the run failed; its output: {folder / attempt.OUTPUT}")
        return row, rows[0]


def differing(one: Row, other: Row) -> list[str]:
    """Return the fields that must be equal when a run is repeated, and are not.

    The first row may be of an earlier version, which left out metrics that the last row of a run lacks.
    """
    fields = ("status", "metrics", "evaluations", "bits", "means", "models", "machine")
    new = dict(vars(other))
    for name in ("evaluations", "means"):
        new[name] = {key: new[name].get(key) for key in getattr(one, name)}
    return [name for name in fields if getattr(one, name) != new[name]]


def difference(row: Row, new: Row) -> str | None:
    """Return, as a message, how a repeated run differs from its row, and perhaps why; None if it does not."""
    if not (fields := differing(row, new)):
        return None
    values = " and ".join(f"{each.metrics.get(each.metric)}" for each in (row, new))
    text = f"the run differs from its row in {', '.join(fields)}: {new.metric} {values}"
    if "machine" not in fields:
        return text
    return f"{text}; the bits depend on the machine class, which was {row.machine}, and is {new.machine}"
