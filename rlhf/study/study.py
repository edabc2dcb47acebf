"""Studies in Python, with the methods that are the commands of `rlhf study`.

    from rlhf import Study

    study = Study("studies/staleness.yaml")
    list(study.plan().lines())  # runs by grid and task: done, stale, missing
    study.run(workers=4)
    study.rows()  # a pandas.DataFrame

The errors are those of `rlhf.Experiment`. Importing this module imports no torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import yaml

from rlhf.core import files
from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import figure
from rlhf.core.statistics import detectable
from rlhf.processes.signals import interruptible
from rlhf.runs.lock import unwritable
from rlhf.study import work
from rlhf.study.file import Document, read_spec
from rlhf.study.page import families, tables, verdicts, write_page
from rlhf.study.plan import ROW, Collection, Configs, Only, Plan, Planned
from rlhf.study.rows import Judged, Results, Row, read_rows
from rlhf.study.spec import TABLE, Cell, Spec, Table
from rlhf.words.mistakes import suggestion

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

    def price(self) -> work.Price:
        """Return the price of the missing runs, after a pilot for each distinct cost that has none.

        Raises:
            UserError: a run is invalid, or the price is above `budget`.
            RunError: a pilot failed.
        """
        plan = self.plan()
        plan.check()
        with interruptible():
            return work.measured_price(plan)

    def run(
        self,
        workers: int = 1,
        only: Only = None,
        nice: int = 0,
        failed: bool = False,
        slurm: Sequence[str] | None = None,
    ) -> None:
        """Carry out the missing runs.

        Args:
            workers: number of workers, that is of runs in parallel.
            only: the values to which the runs are restricted.
            nice: niceness of the runs.
            failed: repeat runs that failed.
            slurm: submit the workers as a SLURM array with these settings of `hydra.launcher`, such as
                "partition=gpu"; None: the workers are processes of this machine.

        Raises:
            UserError: a run is invalid, or the study costs more than its budget; nothing was started.
            RunError: the same error came again and again, or the workers ended too early.
            Interrupted, KeyboardInterrupt: a signal asked to stop; the same call resumes.
        """
        spec = self.spec
        if (reason := unwritable(spec.folder)) is not None:
            remedy = f"copy {spec.file.name} to another folder"
            rule = f"the folder of a study must be one that can be written ({reason})"
            raise UserError(f"{rule}, got {spec.folder}; {remedy}")
        collection, configs, stopped = Collection(spec), Configs(spec), False
        if failed:
            collection.forget_failures()
        plan = Plan(spec, collection.rows(), configs, only)
        plan.check()
        with interruptible():
            if spec.budget:
                work.measured_price(plan)
            if any(run.part == TABLE for run in plan.missing):
                spec.record_claims()
            collection.collect(configs)
            if plan.missing and slurm is not None:
                work.in_array(plan, workers, nice, slurm)
            elif plan.missing:
                stopped = work.in_processes(plan, workers, nice)
            while not collection.collect(configs):
                time.sleep(work.POLL_S)
        missing = len(plan.after(collection.rows()).missing)
        if stopped:
            raise RunError(f"a worker stopped after equal failures (above); {missing} runs are missing")
        if missing:
            raise RunError(f"the workers ended, {missing} runs are missing; the same command resumes")

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

        table = Table.read(text, self.spec.tasks, self.spec.axes)
        if isinstance(table, str):
            raise UserError(f"a table {table}")
        results = Results.read(self.spec)
        known = {name for row in results.rows for name in (*row.metrics, *row.means)}
        if "/" in table.quantity and table.quantity not in known:
            guess = suggestion(table.quantity, known, "did you mean {}?") or "choose one of Study.rows()"
            raise UserError(f"a table must name a metric of the rows, got {table.quantity}; {guess}")
        found = {
            (each.task, method): dict(zip(each.columns, [entry.text for entry in row], strict=True))
            for each in tables(results, [table])
            for method, row in each.rows.items()
        }
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
            code = work.wait_for(work.fork(plan, again))
        if code or not (rows := read_rows(folder / ROW)):
            raise RunError(f"the run failed; its output: {folder / work.OUTPUT}")
        return row, rows[0]


def differing(one: Row, other: Row) -> list[str]:
    """Return the fields that must be equal when a run is repeated, and are not.

    The first row may be of an earlier version, which had fewer metrics. Names that only the second row has
    do not count.
    """
    fields = ("status", "metrics", "evaluations", "bits", "means", "models", "machine")
    new = dict(vars(other))
    for name in ("metrics", "evaluations", "means"):
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


# Methods of another file beside the committed rows of a study: a study file that includes these rows.
#
# Anchor runs repeat a few committed rows first, which shows whether old and new rows may be paired.


_SHARED = ("set", "repeat", "seeds", "axes", "tune", "tables", "figures", "curves", "margin", "resources")
_OWN = ("title", "seeds", "grids", "claims", "budget", "config_dir", "page", "keep")


def write_study(base: Spec, mine: Path) -> Path:
    """Write the file of a study that runs the methods of `mine` and includes the rows of `base`.

    Args:
        base: a study with rows.
        mine: a YAML file with `methods`, and perhaps with `study` (the name) and keys of `_OWN`. A grid
            without `method` has the new methods.

    Returns:
        The file, beside that of `base`.

    Raises:
        UserError: the file has other keys, a method has the name of one in `base`, another study has the
            name, or a run is invalid. No file was written.
    """
    own, other = Document(mine), Document(base.file).values[""]
    given = own.mapping("", ("study", "methods", *_OWN))
    methods = own.mapping("methods")
    for name in methods.keys() & base.methods.keys():
        own.wrong(f"methods.{name}", f"must not be a method of {base.name}", name, "rename the method")
    if not methods:
        own.wrong("methods", "must have a method", "none", "write methods: {mine: [algo=mine]}")
    if not isinstance(own.values.get("grids", []), list):
        own.wrong("grids", "must be a list of grids", given["grids"], "write grids: [{<axis>: all}]")
    for place in range(len(own.values.get("grids", []))):
        own.mapping(f"grids.{place}")
    own.check()
    name = given.get("study", mine.stem)
    beside = base.file.parent
    file = beside.parent / name / "study.yaml" if base.file.name == "study.yaml" else beside / f"{name}.yaml"
    if file.resolve() == mine.resolve():
        raise UserError(f"study must name another file than {mine}, got {name}; set study: {name}_beside")
    claims = own.mapping("claims")
    known = beside.name if base.file.name == "study.yaml" else base.file.stem  # by which the file is found
    grids = given.get("grids") or [grid for grid in other.get("grids", [{}]) if "method" not in grid]
    paths = [(given, "config_dir"), (given, "page"), *((claims, said) for said in claims)]
    for values, key in paths:  # paths of the new file are relative to its own folder
        if isinstance(text := values.get(key), str) and (values is given or ".py:" in text):
            values[key] = os.path.relpath(mine.parent / text, file.parent)
    given |= {"claims": claims} if claims else {}
    tree = {
        "study": name,
        "title": f"{', '.join(methods)} beside {base.title}",
        "include": {known: {}},
        "tasks": {"from": known},
        **{key: other[key] for key in _SHARED if key in other},
        **{key: given[key] for key in _OWN if key in given},
        "grids": [{"method": list(methods), **grid} for grid in grids],
        "methods": {**other["methods"], **methods},
    }
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    if file.exists() and file.read_text() != text:
        raise UserError(f"{file} exists and differs from what {mine} says; edit it, or delete it and repeat")
    if is_new := not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(file, text)
    try:
        spec = read_spec(file, made_of=mine)
        Plan(replace(spec, file=mine, lines=own.lines), []).check()  # messages name the lines of `mine`
    except UserError:
        if is_new:
            file.unlink()
        raise
    return file


def anchors(base: Study, added: Spec) -> list[Planned]:
    """Return the runs that are repeated: two seeds of a method in two cells of the new methods.

    The method is the base of a new method, or the first one that has rows in these cells.
    """
    new = [name for name in added.methods if name not in base.spec.methods]
    bases = [method for name in new if (method := added.methods[name].base)]
    places = {(cell.task, cell.levels) for cell in added.cells() if cell.method in new}
    rows = [each for each in base.plan({"part": [TABLE]}).runs if each.row]
    for method in (*bases, *base.spec.methods):
        shared = {Cell(task, method, levels) for task, levels in places} & {each.run.cell for each in rows}
        if found := sorted(shared, key=base.spec.cells().index):
            ends, seeds = {found[0], found[-1]}, base.spec.seeds[:2]
            return [each for each in rows if each.run.cell in ends and each.run.seed in seeds]
    return []


def compare(base: Study, added: Spec) -> Iterator[str]:
    """Repeat the anchors, and yield what that says about old and new rows as text."""
    equal, gaps, chosen = True, [], anchors(base, added)  # type: bool, list[float], list[Planned]
    if chosen:
        minutes = sum(each.row.cpu_s for each in chosen if each.row) / 60
        yield f"{len(chosen)} anchors: about {math.ceil(minutes)} min of CPU time, and the stages before"
    for each in chosen:
        where = {"task": each.run.cell.task, "method": each.run.cell.method, "seed": str(each.run.seed)}
        row, new = base.repeat({**where, **dict(each.run.cell.levels)}, added.folder / "anchors")
        found, task = differing(row, new), base.spec.tasks[row.task]
        before, after = (each.metrics.get(task.metric or each.metric, task.worst) for each in (row, new))
        equal, gaps = equal and not found, [*gaps, after - before]
        yield f"anchor {each.run}: " + (f"differs in {', '.join(found)}" if found else "equal bits")
    equal = equal and bool(gaps)
    added.record("anchors", equal=equal, differences=gaps)
    if equal:
        yield "old and new rows are paired by seed"
    elif not gaps:
        yield "no anchor: no committed row can be repeated here, so old and new rows are not paired"
    else:
        yield f"old and new rows are not paired; the anchors differ by {figure(fmean(gaps))} on average"
        if len(gaps) > 1 and abs(fmean(gaps)) > detectable(stdev(gaps), len(gaps)):
            hours = work.price_of(base.plan()).done_s / 3600
            yield f"more than chance: run the methods of {base.spec.name} here, too ({hours:.1f} CPU-hours)"
