"""The command `rlhf study run`: starts workers, prints every finished run, and collects the rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from rlhf.study.rows import DIVERGED, FAILED, FINISHED, TABLE
from rlhf.study.spec import Spec

_POLL_S = 2.0


def run(
    spec: Spec,
    count: int = 1,
    only: Mapping[str, Sequence[str]] | None = None,
    niceness: int = 0,
    failed: bool = False,
) -> Plan:
    """Carry out the missing runs of a study, and return its plan afterwards.

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
        collection.rows()
        collection.forget_failures()
    plan = Plan(spec, collection.rows(), configs, only)
    plan.check()
    with interruptible():
        if spec.budget:
            for each in pricing.pilots_due(plan):
                pricing.measure(plan, each)
            pricing.check_budget(plan, pricing.price(plan))
        if any(each.run.part == TABLE for each in plan.runs) or plan.undecided:
            history.record_claims(spec)
        collection.collect(configs)
        codes = list(_watch(Progress(spec, configs, collection, only), count, niceness))
        while not collection.collect(configs):
            time.sleep(_POLL_S)
    plan = Plan(spec, collection.rows(), configs, only)
    if workers.STOPPED in codes:
        raise RunError(f"a worker stopped after equal failures (above); {len(plan.missing)} runs are missing")
    if plan.missing:
        raise RunError(
            f"the workers ended before {len(plan.missing)} runs; the same command resumes the study"
        )
    return plan


class Progress:
    """What has happened since the command began.

    Attributes:
        plan: the plan now.
    """

    def __init__(
        self, spec: Spec, configs: Configs, collection: Collection, only: Mapping[str, Sequence[str]] | None
    ) -> None:
        self.spec, self.configs, self.collection, self.only = spec, configs, collection, only
        self.began = time.monotonic()
        self.plan = Plan(spec, collection.rows(), configs, only)
        self.done = {each.digest for each in self.plan.runs if each.state == DONE}

    def new(self) -> Iterator[str]:
        """Update the plan, and yield a line for each run that has ended since the last call."""
        self.plan = Plan(self.spec, self.collection.rows(), self.configs, self.only)
        for each in self.plan.runs:
            if each.state == DONE and each.digest not in self.done and each.row is not None:
                self.done.add(each.digest)
                task, row = self.spec.tasks[each.run.cell.task], each.row
                value = row.metrics.get(task.metric or row.metric)
                said = f"{task.name} {figure(value)}" if value is not None else row.status
                if row.status != FINISHED:
                    said = f"{row.status}: {row.error}"
                yield f"[{len(self.done)}/{self.total}] {each.run}: {said}, {row.cpu_s:.0f} CPU-s"

    @property
    def total(self) -> int:
        """The number of runs that are known to be needed."""
        return len(self.plan.runs) + len(self.plan.undecided)

    def block(self, count: int) -> list[str]:
        """Return the state as lines: totals, the runs at work, and how far the seeds are."""
        price = pricing.price(self.plan)
        statuses = Counter(each.row.status for each in self.plan.runs if each.state == DONE and each.row)
        states = "".join(f", {statuses[name]} {name}" for name in (DIVERGED, FAILED) if statuses[name])
        hours = f"{price.done_s / 3600:.1f} of {(price.done_s + price.left_s) / 3600:.1f} CPU-h"
        left = f", {clock(price.left_s / count)} left" if not price.unknown else ""
        lines = [f"{self.spec.name}  {len(self.done)} of {self.total} runs{states}   {hours}{left}"]
        at_work = (each for each in self.plan.runs if each.state != DONE and (each.folder / LOCK).exists())
        lines += [f"  {each.run}  {_update(each)}" for each in at_work]
        return [*lines, f"{_seeds(self.plan)}; Ctrl-C stops, the same command resumes"]


def _watch(progress: Progress, count: int, niceness: int) -> Iterator[int]:
    """Yield the exit codes of the workers; print finished runs, and collect rows, until all have ended."""
    spec, configs = progress.spec, progress.configs
    if not progress.plan.missing:
        return
    with workers.started(spec, configs, count, progress.only, niceness) as processes:
        live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        if live:
            live.start()
        try:
            while processes:
                time.sleep(_POLL_S)
                codes = list(workers.ended(processes))
                if lines := list(progress.new()):
                    console.print("\n".join(lines), markup=False, soft_wrap=True)
                    progress.collection.collect(configs)
                if live:
                    live.update(Text("\n".join(progress.block(count))), refresh=True)
                yield from codes
                if workers.STOPPED in codes:
                    return
        finally:
            if live:
                live.stop()


def _update(planned: Planned) -> str:
    """Return how far a run is that a worker carries out."""
    try:
        state = RunFolder(planned.folder).read_state()
    except UserError:  # it is written at this moment
        state = None
    return f"update {state['update']} of {state['num_updates']}" if state else "starts"


def _seeds(plan: Plan) -> str:
    """Return how many seeds of the cells are done."""
    counts = Counter(each.run.cell for each in plan.runs if each.state == DONE and each.run.part == TABLE)
    per_cell = [counts[cell] for cell in {run.cell for run in _tables(plan)}] or [0]
    low, high = min(per_cell), max(per_cell)
    return f"seeds done: {low}{f' to {high}' if high > low else ''} of {len(plan.spec.seeds)}"


def _tables(plan: Plan) -> Iterable:
    return [*(each.run for each in plan.runs if each.run.part == TABLE), *plan.undecided]
