"""The command `rlhf study run`, and its workers: equal processes without a head.

    worker:  the first run without a row whose folder is not locked -> fork an attempt -> the next run
    command: starts workers (processes, or the elements of a SLURM array), prints finished runs, collects rows

The lock of a run folder (`rlhf.runs.lock`) divides the work, so workers of several commands and hosts
share a study on one file system. A worker that is killed leaves a run that another one resumes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, JobStatus
from hydra.utils import instantiate
from rich.live import Live
from rich.text import Text

from rlhf.config.compose import initialized
from rlhf.config.cores import set_environment
from rlhf.config.mistakes import explained
from rlhf.core.console import console, show
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.formatting import clock, figure
from rlhf.core.output import print_error
from rlhf.core.pasting import override
from rlhf.launch.hydra_internals import multirun_config
from rlhf.launch.jobs import Job, completed, failure_message
from rlhf.launch.slurm import requeue
from rlhf.launch.submitit_jobs import submit
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK, Lock
from rlhf.runs.writable import unwritable
from rlhf.study import attempt, history, pricing
from rlhf.study.collection import Collection
from rlhf.study.planning import Configs, Only, Plan, Planned
from rlhf.study.rows import DIVERGED, FAILED, TABLE
from rlhf.study.spec import Spec

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

LAUNCHER = "slurm"  # option of hydra/launcher
_RESOURCES = {"threads": "cpus_per_task", "gpus": "gpus_per_node", "minutes": "timeout_min"}
SAME = 3  # equal failures in a row that stop a worker
_STOPPED = 3  # exit code of a worker after that
_POLL_S = 2.0  # seconds between two looks for finished runs, and for work while other workers have all runs


def run(
    spec: Spec,
    count: int = 1,
    only: Only = None,
    niceness: int = 0,
    failed: bool = False,
    slurm: Sequence[str] | None = None,
) -> None:
    """Carry out the missing runs of a study.

    Args:
        spec: the study.
        count: number of workers, that is of runs in parallel.
        only: the values to which the runs are restricted.
        niceness: niceness of the runs.
        failed: repeat runs that failed.
        slurm: submit the workers as a SLURM array with these settings of `hydra.launcher`, such as
            "partition=gpu"; None: the workers are processes of this machine.

    Raises:
        UserError: a run is invalid, or the study costs more than its budget; nothing was started.
        RunError: the same error came again and again, or the workers ended too early.
        Interrupted, KeyboardInterrupt: a signal asked to stop; the same call resumes.
    """
    if (reason := unwritable(spec.folder)) is not None:
        raise UserError(
            f"the folder of a study must be one that can be written ({reason}), got {spec.folder}; copy "
            f"{spec.file.name} to another folder"
        )
    collection, configs, stopped = Collection(spec), Configs(spec), False
    if failed:
        collection.forget_failures()
    plan = Plan(spec, collection.rows(), configs, only)
    plan.check()
    with interruptible():
        if spec.budget:
            pricing.measured_price(plan)
        if any(run.part == TABLE for run in plan.missing):
            history.record_claims(spec)
        collection.collect(configs)
        if plan.missing and slurm is not None:
            _in_array(plan, count, niceness, slurm)
        elif plan.missing:
            stopped = _in_processes(plan, count, niceness)
        while not collection.collect(configs):
            time.sleep(_POLL_S)
    plan = plan.after(collection.rows())
    if stopped:
        raise RunError(f"a worker stopped after equal failures (above); {len(plan.missing)} runs are missing")
    if plan.missing:
        raise RunError(f"the workers ended, {len(plan.missing)} runs are missing; the same command resumes")


def _in_processes(plan: Plan, count: int, niceness: int) -> bool:
    """Let workers in processes of this machine carry out runs; return whether equal failures stopped one."""
    _load()

    def work() -> None:
        try:
            with interruptible():
                Worker(plan, niceness).work()
        except (RunError, UserError) as error:
            print_error(f"error: {error}")
            raise SystemExit(_STOPPED if isinstance(error, RunError) else 1) from None

    processes = [attempt.forked(work) for _ in range(count)]
    try:
        with (watch := Watch(plan, count)).live:
            codes: set[int | None] = {None}
            while None in codes and _STOPPED not in codes:
                time.sleep(_POLL_S)
                codes = {each.exitcode for each in processes}
                watch.look()
        return _STOPPED in codes
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            each.join()


def _in_array(plan: Plan, count: int, niceness: int, settings: Sequence[str]) -> None:
    """Let the elements of one SLURM array carry out runs, and print the errors of workers.

    Workers that are still in the queue after an earlier call are not submitted again.
    """
    spec, folder = plan.spec, plan.spec.folder.absolute() / "workers"
    resources = {_RESOURCES[name]: value for name, value in spec.resources.items() if name in _RESOURCES}
    own = {"submitit_folder": f"{folder}/%j", "name": spec.name, **resources}
    words = [
        f"hydra/launcher={LAUNCHER}",
        *(override(f"hydra.launcher.{key}", value) for key, value in own.items()),
        *(f"hydra.launcher.{each}" for each in settings),
    ]
    with explained(words, sweep=True), initialized() as search:
        launcher = instantiate(multirun_config([*search, *words]).hydra.launcher)
    names = [f"worker-{number}" for number in range(1, count + 1)]
    jobs = [
        Job(number=number, label=name, folder=RunFolder(folder / name)) for number, name in enumerate(names)
    ]
    with (watch := Watch(plan, count)).live:
        results = submit(launcher, jobs, work=_Element(plan, niceness), meanwhile=watch.look)
    for name, result in zip(names, results, strict=True):
        if result.status is JobStatus.FAILED:
            print_error(f"error: {name}: {failure_message(result._return_value)}")


class _Element:
    """A worker as an element of an array; submitit requeues the element after `checkpoint`."""

    def __init__(self, plan: Plan, niceness: int) -> None:
        self.spec, self.only, self.niceness = plan.spec, plan.only, niceness

    def __call__(self, number: int) -> JobReturn:
        _load()
        try:
            with interruptible():
                Worker(Plan(self.spec, [], only=self.only), self.niceness).work()
        except Interrupted as reason:
            requeue(reason)
            raise RunError(str(reason)) from None
        return completed(None)

    def checkpoint(self, number: int) -> DelayedSubmission:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


def _load() -> None:
    """Import the libraries of runs, which the attempts of a process share."""
    set_environment()
    import rlhf.stages.run  # noqa: F401


class Worker:
    """A process that carries out runs, one after the other.

    Args:
        plan: the study, with any rows.
        niceness: niceness of the runs.
    """

    def __init__(self, plan: Plan, niceness: int = 0) -> None:
        self.plan, self.niceness = plan, niceness
        self.collection = Collection(plan.spec)
        self.errors: list[str] = []  # of the last attempts; a success clears them

    def work(self) -> None:
        """Carry out runs until no run is missing.

        Raises:
            RunError: `SAME` attempts in a row failed with the same error.
            Interrupted, KeyboardInterrupt: a signal asked to stop; the attempt has written its checkpoint.
        """
        while missing := self._missing():
            if not any(self._take(each) for each in missing):
                time.sleep(_POLL_S)

    def _missing(self) -> list[Planned]:
        """Return the runs without a row; those that failed before come last."""
        self.plan = self.plan.after(self.collection.rows())
        runs = [each for each in self.plan.runs if not each.row]
        return sorted(runs, key=lambda each: bool(attempt.failures(each.folder)))

    def _take(self, planned: Planned) -> bool:
        """Carry out a run; return False if another worker has it."""
        lock = Lock(planned.folder / LOCK, planned.folder)
        if not lock.acquire():
            return False
        try:
            if not attempt.is_done(self.plan.spec, planned):
                attempt.begin(planned)
                self._carry_out(planned)
        finally:
            lock.release()
        return True

    def _carry_out(self, planned: Planned) -> None:
        before = len(attempt.failures(planned.folder))
        code = attempt.wait_for(attempt.fork(self.plan, planned, self.niceness))
        if code < 0:  # killed by a signal; the next attempt resumes from the checkpoint
            state = RunFolder(planned.folder).read_state() or {}
            text = f"killed by signal {-code} after update {state.get('update', 0)}"
            attempt.note_failure(planned, text)
            if not attempt.is_done(self.plan.spec, planned):
                return  # kills come from outside, so equal ones of several runs say nothing
        new = attempt.failures(planned.folder)[before:]
        self.errors = [*self.errors, *(each.replace(planned.folder.name, "<run>") for each in new)]
        if not new:
            self.errors.clear()
        elif len(self.errors) >= SAME and len({*self.errors[-SAME:]}) == 1:
            raise RunError(
                f"{SAME} runs in a row failed with the same error ({self.errors[-1]}), the last one in "
                f"{planned.folder}; remove the cause, then the same command resumes the study"
            )


class Watch:
    """The terminal while workers work: a line for each finished run, and below them the state of the study.

    Args:
        plan: the study.
        count: number of workers.
    """

    def __init__(self, plan: Plan, count: int) -> None:
        self.live = Live(console=console, transient=True, auto_refresh=False)
        self.plan, self.count, self.collection = plan, count, Collection(plan.spec)
        self.known = self.collection.rows()
        self.done = {each.digest for each in plan.runs if each.row}
        self.seen: set[str] = set()  # runs and stages that have begun

    def look(self) -> None:
        """Print what has begun or finished since the last look, and collect the rows of finished runs."""
        if (rows := self.collection.rows()) != self.known:
            self.known, self.plan = rows, self.plan.after(rows)
        of = len(self.plan.runs) + len(self.plan.undecided)
        for each in self.plan.runs:
            if not each.row and (each.folder / LOCK).exists():
                if each.digest not in self.seen:
                    self.seen.add(each.digest)
                    show(f"starts: {each.run}")
                attempt.announce(each.folder, each.run, self.seen)
            if each.row and each.digest not in self.done:
                self.done.add(each.digest)
                line = f"[{len(self.done)}/{of}] {_outcome(self.plan, each)}"
                show(line)
                self.collection.collect(self.plan.configs)
        if console.is_terminal:
            self.live.update(Text("\n".join(block(self.plan, self.count))), refresh=True)


def block(plan: Plan, count: int) -> list[str]:
    """Return the state of a study as lines: totals, the runs at work, and how many seeds are complete."""
    price, missing = pricing.price(plan), plan.missing
    statuses = [each.row.status for each in plan.runs if each.row]
    states = "".join(f", {statuses.count(name)} {name}" for name in (DIVERGED, FAILED) if name in statuses)
    of, total = len(statuses) + len(missing), price.done_s + price.left_s
    hours = f"{pricing.duration(price.done_s)} of {pricing.duration(total)} CPU time"
    left = "" if price.unknown else f", {clock(price.left_s / count)} left"
    lines = [f"{plan.spec.name}  {pricing.bar(len(statuses), of)} runs{states}   {hours}{left}"]
    for each in plan.runs:
        if not each.row and (each.folder / LOCK).exists():
            try:
                state = RunFolder(each.folder).read_state()
            except UserError:  # it is written at this moment
                state = None
            at = f"update {state['update']} of {state['num_updates']}" if state else "starts"
            lines.append(f"  {each.run}  {at}")
    due, seeds = Counter(run.cell for run in missing if run.part == TABLE), len(plan.spec.seeds)
    finished = f"at least {seeds - max(due.values(), default=0)} of {seeds}"
    return [*lines, f"seeds done: {finished}; Ctrl-C stops, the same command resumes"]


def _outcome(plan: Plan, planned: Planned) -> str:
    """Return a run with its value, or its error, as text."""
    task, row = plan.spec.tasks[planned.run.cell.task], planned.row
    assert row is not None
    value = row.metrics.get(task.metric or row.metric)
    said = f"{row.status}: {row.error}" if value is None or row.error else f"{task.name} {figure(value)}"
    return f"{planned.run}: {said}, {row.cpu_s:.0f} CPU-s"
