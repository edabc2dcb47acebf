"""The command `rlhf study run`: starts workers, prints every finished run, and collects the rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from rich.live import Live
from rich.text import Text

from rlhf.core.console import console
from rlhf.core.errors import RunError, UserError
from rlhf.core.formatting import clock, figure
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK
from rlhf.study import history, pricing, workers
from rlhf.study.collection import Collection
from rlhf.study.planning import DONE, Configs, Plan, Planned
from rlhf.study.rows import DIVERGED, FAILED, TABLE
from rlhf.study.spec import Spec

_POLL_S = 2.0


def run(
    spec: Spec,
    count: int = 1,
    only: Mapping[str, Sequence[str]] | None = None,
    niceness: int = 0,
    failed: bool = False,
) -> None:
    """Carry out the missing runs of a study.

    Args:
        spec: the study.
        count: number of workers, that is of runs in parallel.
        only: see `Plan`.
        niceness: niceness of the runs.
        failed: repeat runs that failed.

    Raises:
        UserError: a run is invalid, or the study costs more than its budget; nothing was started.
        RunError: the same error came again and again, or the workers ended too early.
        Interrupted, KeyboardInterrupt: a signal asked to stop; the same call resumes.
    """
    collection, configs = Collection(spec), Configs(spec)
    if failed:
        collection.forget_failures()
    plan = Plan(spec, collection.rows(), configs, only)
    plan.check()
    with interruptible():
        if spec.budget:
            pricing.measured_price(plan)
        if any(each.run.part == TABLE for each in plan.runs) or plan.undecided:
            history.record_claims(spec)
        collection.collect(configs)
        codes = list(_watch(plan, collection, count, niceness)) if plan.missing else []
        while not collection.collect(configs):
            time.sleep(_POLL_S)
    plan = plan.after(collection.rows())
    if workers.STOPPED in codes:
        raise RunError(f"a worker stopped after equal failures (above); {len(plan.missing)} runs are missing")
    if plan.missing:
        raise RunError(f"the workers ended, {len(plan.missing)} runs are missing; the same command resumes")


def _watch(plan: Plan, collection: Collection, count: int, niceness: int) -> Iterator[int]:
    """Yield the exit codes of the workers; print finished runs, and collect rows, until all have ended."""
    done = {each.digest for each in plan.runs if each.state == DONE}
    known = collection.rows()
    with ExitStack() as ends:
        processes = ends.enter_context(workers.started(plan, count, niceness))
        live = Live(console=console, transient=True, auto_refresh=False)
        if console.is_terminal:
            ends.enter_context(live)
        while processes:
            time.sleep(_POLL_S)
            codes = list(workers.ended(processes))
            if (rows := collection.rows()) != known:
                known, plan = rows, plan.after(rows)
            for each in plan.runs:
                if each.state == DONE and each.digest not in done and each.row is not None:
                    done.add(each.digest)
                    line = f"[{len(done)}/{len(plan.runs) + len(plan.undecided)}] {_outcome(plan, each)}"
                    console.print(line, markup=False, soft_wrap=True)
                    collection.collect(plan.configs)
            if console.is_terminal:
                live.update(Text("\n".join(block(plan, count))), refresh=True)
            yield from codes
            if workers.STOPPED in codes:
                return


def block(plan: Plan, count: int) -> list[str]:
    """Return the state of a study as lines: totals, the runs at work, and how far the seeds are."""
    price = pricing.price(plan)
    done = [each for each in plan.runs if each.state == DONE and each.row is not None]
    statuses = Counter(each.row.status for each in done if each.row is not None)
    states = "".join(f", {statuses[name]} {name}" for name in (DIVERGED, FAILED) if statuses[name])
    hours = f"{price.done_s / 3600:.1f} of {(price.done_s + price.left_s) / 3600:.1f} CPU-h"
    left = "" if price.unknown else f", {clock(price.left_s / count)} left"
    lines = [f"{plan.spec.name}  {len(done)} of {len(done) + len(plan.missing)} runs{states}   {hours}{left}"]
    for each in plan.runs:
        if each.state != DONE and (each.folder / LOCK).exists():
            lines.append(f"  {each.run}  {_update(each)}")
    per_cell = Counter(run.cell for run in plan.missing if run.part == TABLE)
    seeds = len(plan.spec.seeds)
    finished = f"at least {seeds - max(per_cell.values(), default=0)} of {seeds}"
    return [*lines, f"seeds done: {finished}; Ctrl-C stops, the same command resumes"]


def _outcome(plan: Plan, planned: Planned) -> str:
    """Return a run with its value, or its error, as text."""
    task, row = plan.spec.tasks[planned.run.cell.task], planned.row
    assert row is not None
    value = row.metrics.get(task.metric or row.metric)
    said = f"{row.status}: {row.error}" if value is None or row.error else f"{task.name} {figure(value)}"
    return f"{planned.run}: {said}, {row.cpu_s:.0f} CPU-s"


def _update(planned: Planned) -> str:
    """Return how far a run is that a worker carries out."""
    try:
        state = RunFolder(planned.folder).read_state()
    except UserError:  # it is written at this moment
        state = None
    return f"update {state['update']} of {state['num_updates']}" if state else "starts"
