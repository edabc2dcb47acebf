"""Carrying out a run in this process, and reading its row from its folder. This module imports torch."""

from __future__ import annotations

import resource
import shutil
import traceback
from functools import cache
from pathlib import Path
from statistics import mean

from benchmarks.atlas.design import Design, Run
from benchmarks.atlas.record import DIVERGED, FAILED, FINISHED, Row, row
from rlhf.checks.check import checked
from rlhf.checks.composing import composed
from rlhf.core.errors import RunError
from rlhf.core.files import component
from rlhf.report.runs import Status, read_run
from rlhf.runs.environment import git_commit
from rlhf.runs.folder import RunFolder
from rlhf.stages.prerequisites import complete
from rlhf.stages.run import run as train

RESULTS = ("docs/results", "docs/figures", "outputs")  # folders of results, which studies change


def folder_of(design: Design, run: Run) -> Path:
    """Return the run folder of a run."""
    cell = run.cell
    name = f"{cell.task}-{cell.method}-lag{cell.lag}-n{cell.minibatches}-seed{run.seed}-{design.key(run)}"
    return design.outputs / component(name)


def carry_out(design: Design, run: Run, folder: Path | None = None) -> Row:
    """Carry out a run, or resume it, and return its row. The folder keeps all files except the model.

    Args:
        design: the study.
        run: the run.
        folder: the run folder; None: `folder_of`.

    Raises:
        Interrupted, KeyboardInterrupt: a signal asked to stop; the same call resumes the run.
    """
    folder = folder or folder_of(design, run)
    commit()  # the code that this process has imported may change during the run
    try:
        overrides = design.overrides_of(run)
        cfg = complete(checked(composed(overrides)), train)
        began = cpu_s()
        try:
            train(cfg, RunFolder(folder), check=False)
        except RunError as error:
            if not diverged(folder):
                raise
            return read_row(design, run, folder, DIVERGED, str(error), cpu_s() - began)
        shutil.rmtree(RunFolder(folder).model, ignore_errors=True)
        return read_row(design, run, folder, FINISHED, None, cpu_s() - began)
    except Exception as error:
        traceback.print_exc()
        return row(design, run, FAILED, (), error=first_line(error))


def diverged(folder: Path) -> bool:
    """Return whether a loss of the last session of a run was not finite."""
    try:
        return read_run(folder).status is Status.failed
    except ValueError:
        return False


def read_row(design: Design, run: Run, folder: Path, status: str, error: str | None, seconds: float) -> Row:
    """Return the row of a run from the files of its folder."""
    found = read_run(folder)
    metric = design.tasks[run.cell.task].metric
    names = ("update", "eval/kl", metric, "eval/gold_score")
    ess = [each["mismatch/ess"] for each in found.trained if "mismatch/ess" in each]
    return row(
        design,
        run,
        status,
        [tuple(each[name] for name in names) for each in found.evaluations],  # type: ignore[misc]
        error=error and error.partition(";")[0],
        updates=int(found.update) * run.cell.minibatches,
        ess=mean(ess[-max(1, len(ess) // 4) :]) if ess else None,
        cpu_s=seconds,
        versions=f"{commit()}, torch {found.environment.get('packages', {}).get('torch', '?')}",
    )


@cache
def commit() -> str:
    """Return the commit of the code at the first call, marked if the code has changes."""
    found = git_commit(excluding=RESULTS)
    if found is None:
        return "unknown"
    return found["commit"][:10] + (" + changes" if found["changed"] else "")


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its class."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
