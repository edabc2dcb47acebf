"""Sweeps (`-m`): run only unfinished jobs, continue if a job fails, and list the failed jobs at the end.

    sweeper (every combination, or search) -> Sweep -> launcher (in this process, joblib, submitit)

Sweep stands between Hydra's sweeper and its launcher, so that every launcher behaves alike. This module
imports no torch.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import overrides_of
from rlhf.config.run import SEARCH_SWEEPER, Resume
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.formatting import figure, short_path
from rlhf.core.launched import is_first_rank, world_size
from rlhf.experiment import Experiment
from rlhf.launch import preflight
from rlhf.launch.command_line import launchers_inside, requeue, submitit_executor, uses_basic_sweeper
from rlhf.launch.preflight import Job, completed, failed
from rlhf.processes import signals
from rlhf.runs.lock import waiting_claim
from rlhf.runs.resuming import refuse_another_run
from rlhf.terminal import console as progress
from rlhf.terminal.console import console, print_error, say

if TYPE_CHECKING:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
    from submitit import Job as Submitted


class Sweep(Launcher):
    """One sweep: a launcher that passes unfinished jobs to the launcher of the config.

    Attributes:
        jobs: the jobs that the sweeper has passed to this launcher so far.
        total: number of jobs of the whole sweep; None: not known.
        fixed: the overrides that all jobs share, if the sweeper sets them; they are not in labels.
        conclusion: lines that the sweeper wants to have below the table.
    """

    launcher: Launcher  # of the config
    total: int | None = None
    fixed: Sequence[str] | None = None
    conclusion: Sequence[str] = ()

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let Hydra launch jobs through this launcher during the block, and report the sweep at the end.

        Without a sweep in the block, nothing is reported.

        Raises:
            SystemExit: a job failed; with code 2 if every failure is invalid input or configuration, else 1.
        """
        global current
        current = self
        Plugins.instance().class_name_to_class[SEARCH_SWEEPER] = _search_sweeper  # type: ignore[assignment]
        try:
            with launchers_inside(self):
                yield
        except (Interrupted, KeyboardInterrupt):
            self.report()
            raise
        except Exception as error:
            # A sweeper may raise the error of a job again, or its own error if all jobs failed.
            errors = [job.error for job in self.failures]
            if error not in errors and not 0 < len(self.jobs) == len(errors):
                raise
        finally:
            current = None
        self.report()
        if self.failures:
            raise SystemExit(2 if all(isinstance(job.error, UserError) for job in self.failures) else 1)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config of the sweep. The launcher of the config is already set up."""
        self.config = config
        self.total = config.hydra.sweeper.get("n_trials")
        if uses_basic_sweeper(config):
            self.total = len(preflight.sweep_jobs(config))

    @property
    def failures(self) -> list[Job]:
        """The failed jobs."""
        return [job for job in self.jobs if job.error is not None]

    def title(self, overrides: Sequence[str]) -> str | None:
        """Return the title of a job, such as "job 1 of 4: seed=1"; None: the job is not known."""
        for job in self.jobs:
            if job.overrides == overrides:
                of = f" of {self.total}" if self.total is not None and job.number <= self.total else ""
                return f"job {job.number}{of}: {job.label}"
        return None

    def report(self) -> None:
        """Print the table of two or more jobs, the conclusion of the sweeper, and the failed jobs."""
        table: list[str] = []
        if len(self.jobs) > 1:
            folder = Path(self.config.hydra.sweep.dir)
            own = list(dict.fromkeys(job.path for job in self.jobs if job.folder is not None))
            names = {path.resolve() for path in own}
            others = [file for file in folder.glob("*/config.yaml") if file.parent.resolve() not in names]
            command = ["python", "-m", "rlhf.report", *map(short_path, own if others else [folder])]
            table = ["", *lines(self.jobs), f"compare: {shlex.join(command)}"]
        for line in [*table, *self.conclusion]:
            console.print(line, markup=False, soft_wrap=True)
        if not self.failures:
            return
        remedy = "the others are kept; the same command runs only missing jobs"
        print_error(f"error: {len(self.failures)} of {len(self.jobs)} jobs failed; {remedy}")
        for job in self.failures:
            print_error(f"  - {job.label}: {preflight.failure_message(job.error)}")
            if job.folder is not None:
                print_error(f"    {job.path}")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished, and return a result for every job.

        Jobs with the same run folder are run once.
        """
        labels = preflight.distinct_overrides(job_overrides, self.fixed)
        given = enumerate(zip(job_overrides, labels, strict=True), initial_job_idx + 1)
        jobs = [Job(number=n, label=label or f"job {n}", overrides=[*words]) for n, (words, label) in given]
        self.jobs += jobs
        results: dict[Path, JobReturn] = {}
        due: dict[Path, Job] = {}
        for job in jobs:
            try:
                done = self.compose(job)
            except UserError as error:
                job.error, job.folder = error, None
                continue
            if (first := due.get(job.path)) is not None:
                job.status = f"same run as job {first.number}"
                say(f"{job.label}: the same run as {first.label} (their run folder is the same)")
            elif done is not None:
                job.status = "finished before"
                say(f"{job.label}: {preflight.finished_message(job.path, done.return_value, job.metric)}")
                results[job.path] = done
            else:
                due[job.path] = job
        if due:
            results.update(zip(due, self.run(list(due.values()), initial_job_idx), strict=True))
        for path, job in due.items():
            if results[path].status is JobStatus.FAILED:
                job.error = results[path]._return_value
        returns = [results[job.path] if job.error is None else failed(job.error) for job in jobs]
        if uses_basic_sweeper(self.config):  # this sweeper stops at a failed job
            return [completed(None) if result.status is JobStatus.FAILED else result for result in returns]
        return returns

    def compose(self, job: Job) -> JobReturn | None:
        """Set the run folder and the metric of a job, and return its result if the job need not run.

        Raises:
            UserError: the config is invalid, for example because the sweeper chose an invalid value.
        """
        experiment = preflight.experiment_of(self.config, job.overrides, job.number)
        experiment.validate()
        cfg = experiment.config
        job.folder, job.metric = experiment.files, cfg.metric
        if cfg.resume is Resume.never:
            return None
        refuse_another_run(cfg, experiment.files)
        return job.done

    def run(self, jobs: list[Job], first: int) -> Sequence[JobReturn]:
        """Run `jobs` with the launcher of the config, and return a result for each job.

        Args:
            jobs: the jobs to run.
            first: number of the first job, from 0.
        """
        if submitit_executor(self.launcher) is not None:
            return submit_jobs(self.launcher, jobs, first)
        with _waiting_for_jobs(self.launcher, len(jobs)):
            try:
                return self.launcher.launch([job.overrides for job in jobs], initial_job_idx=first)
            except Exception as error:  # joblib raises if one of its processes died
                lost = failed(RunError(f"the launcher stopped: {preflight.failure_message(error)}"))
                return [job.done or lost for job in jobs]


current: Sweep | None = None  # the sweep that this process runs


def _search_sweeper(**settings: Any) -> Sweeper:
    """Return the sweeper of `hydra/sweeper=search`, which needs Optuna."""
    from rlhf.launch.search import SearchSweeper

    return SearchSweeper()


@contextmanager
def _waiting_for_jobs(launcher: Launcher, jobs: int) -> Iterator[None]:
    """After a signal during the block, in which joblib runs jobs, stop the jobs and wait for their end.

    The block has no effect with a launcher other than joblib.

    Raises:
        Interrupted: a signal was received.
    """
    settings, interruption = getattr(launcher, "joblib", None), signals.active
    if settings is None or interruption is None:
        yield
        return
    from joblib import effective_n_jobs

    # A signal ends a process without a job, so each process has one.
    settings["n_jobs"] = min(effective_n_jobs(settings["n_jobs"]), jobs)
    interruption.defer()
    signals.call_at_signal(_pass_on)
    try:
        yield
    except KeyboardInterrupt:  # from a process for jobs
        if interruption.received is None:
            raise
    finally:
        signals.do_not_call_at_signal(_pass_on)
        interruption.deferred = False
    if interruption.received is not None:
        said = "each run wrote a checkpoint if training had begun; the same command resumes them"
        raise Interrupted(f"interrupted by {interruption.cause}; {said}", interruption.received)


def _pass_on() -> None:
    """Send SIGTERM to the child processes in this process group; after Ctrl-C, it is not a second signal."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(child.pid) == os.getpgrp():
                child.send_signal(signal.SIGTERM)


# A job of a sweep, in the process that runs it: that of the sweep, one of joblib, or one of submitit.
#
# A process of joblib runs several jobs. After a signal, a running job writes its checkpoint, and a job that
# has not begun is refused. If the process of the sweep is killed, a process of joblib does the same and ends.


_handlers = ExitStack()  # in a process of joblib: its signal handlers, from its first job until its end
_busy = threading.Lock()  # locked while a job runs in a process of joblib


def run_job(config: DictConfig, folder: Path) -> float | None:
    """Run a job, and return the value of the metric that a sweeper optimises.

    Args:
        config: the config of the job.
        folder: the run folder.

    Raises:
        UserError, RunError: the job failed, or a signal stopped the process of the job.
        Interrupted: a signal stopped the process of the sweep, which runs the job.
    """
    of_joblib = current is None and "joblib" in HydraConfig.get().launcher._target_
    try:
        with _process_of_joblib() if of_joblib else nullcontext():
            return _execute(config, folder)
    except Interrupted as reason:
        if current is not None:
            raise
        if not of_joblib:
            requeue(reason)
        raise RunError(str(reason)) from None
    except (UserError, RunError):
        raise
    except Exception:
        traceback.print_exc()  # the exception may arrive in the process of the sweep without its traceback
        raise


def _execute(config: DictConfig, folder: Path) -> float | None:
    job = HydraConfig.get()
    overrides = overrides_of(job.overrides)
    experiment = Experiment.composed(config, overrides, folder)
    experiment.validate()  # perhaps on another machine than that of the sweep
    begin_job(job.job.num, overrides)
    metric = experiment.config.metric
    if (finished := experiment.prepare(wait=world_size() == 1)) is not None:
        preflight.announce(experiment.files, finished, metric)
        return finished["result"].get(metric)
    if preflight.is_search(job.sweeper) and is_first_rank():
        from rlhf.launch.search import pruning_hooks

        settings = OmegaConf.to_object(job.sweeper)
        experiment.hooks = pruning_hooks(settings, Path(job.sweep.dir), overrides, metric)
    return experiment.execute(claim=waiting_claim)


def begin_job(number: int, overrides: list[str]) -> None:
    """Print the title of a job. In a process for jobs, later titles begin with the number of the job.

    Args:
        number: number of the job among the jobs that run, from 0.
        overrides: overrides of the job.
    """
    known = None if current is None else current.title(overrides)
    console.print(known or f"job {number + 1}: {' '.join(overrides)}", markup=False, style="bold")
    progress.job = f"job {number + 1} " if current is None else ""


@contextmanager
def _process_of_joblib() -> Iterator[None]:
    """Run a job in a process of joblib, which keeps its signal handlers between jobs.

    Raises:
        Interrupted: a signal was received, also before this job.
    """
    if signals.active is None:
        _handlers.enter_context(signals.interruptible())
        signals.at_end_of([os.getppid()], _end_after_sweep)
    assert signals.active is not None, "joblib runs jobs in the main thread"
    signals.active.check()
    with _busy:
        try:
            yield
        finally:
            signals.active.deferred = True


def _end_after_sweep() -> None:
    """Let a running job stop, and end this process: that of the sweep has ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    with _busy:
        os._exit(os.EX_TEMPFAIL)


# The table at the end of a sweep: job, result, status, swept values and run folder.


def lines(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield the lines of the table: two lines per job, the second with the run folder."""
    metrics = {job.metric for job in jobs if job.metric}
    heading = metrics.pop() if len(metrics) == 1 else "result"
    values = [None if (done := job.done) is None else done.return_value for job in jobs]
    results = ["" if value is None else figure(value) for value in values]
    if heading == "result":
        results = [f"{job.metric} {text}" if text else "" for job, text in zip(jobs, results, strict=True)]
    states = [job.state for job in jobs]
    width, state_width = max(map(len, [heading, *results])), max(map(len, ["status", *states]))
    yield f"job  {heading:>{width}}  {'status':{state_width}}  values".rstrip()
    for job, result, state in zip(jobs, results, states, strict=True):
        yield f"{job.number:3}  {result:>{width}}  {state:{state_width}}  {job.label}".rstrip()
        if job.folder is not None and not (job.status or "").startswith("same"):
            yield f"     {job.folder.path}"


# Sweep jobs in their own processes, by submitit: SLURM jobs, or processes on this machine.
#
# Differences from Hydra's submitit launcher:
# - If a job dies, this launcher still waits for the other jobs.
# - If a job is already in SLURM's queue, this launcher waits for this job instead of submitting a new job.
# - Ctrl-C cancels the jobs.
#
# Jobs are pickled into `hydra.launcher.submitit_folder`, which also receives the output of the jobs.


_POLL_S = 1.0  # seconds between checks for results
_ASK_SLURM_S = 10.0  # seconds between calls of squeue; SLURM's controller is shared by all users
_LINGER_S = 15.0  # seconds after the end of a SLURM job until its result file must be visible on this host

# Keys of hydra.launcher -> names of SBATCH_ variables, where the names differ.
_SBATCH_NAMES = {
    "timeout_min": "TIMELIMIT",
    "signal_delay_s": "SIGNAL",
    "mem_gb": "MEM_PER_NODE",
    "name": "JOB_NAME",
}


def submit_jobs(
    launcher: BaseSubmititLauncher,
    jobs: Sequence[Job],
    first: int = 0,
    work: Callable[[int], JobReturn] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[JobReturn]:
    """Submit jobs as one array, wait until all jobs have ended, and return a result for each job.

    Args:
        launcher: the submitit launcher with its settings.
        jobs: the jobs to run.
        first: number of the first job.
        work: called in each job with the number of the job; None: the launcher carries out the overrides.
        meanwhile: called from time to time during the wait.

    Raises:
        UserError: SLURM is not installed here, rejects the jobs, or would stop them at once.
        KeyboardInterrupt, Interrupted: the wait was interrupted.
    """
    limit, warning = launcher.params["timeout_min"], launcher.params.get("signal_delay_s", 0)
    if limit * 60 <= warning:
        raise UserError(
            "hydra.launcher.timeout_min must be longer than hydra.launcher.signal_delay_s (otherwise a job "
            f"is stopped when it starts), got {limit} minutes and {warning} seconds; "
            f"set hydra.launcher.timeout_min={warning // 60 + 60}"
        )
    slurm = submitit_executor(launcher) == "slurm"
    if slurm and shutil.which("sbatch") is None:
        rule = "hydra/launcher=slurm needs SLURM (sbatch is not found here), got a machine without SLURM"
        raise UserError(f"{rule}; run the command on a login node, or choose hydra/launcher=local")
    queue = _Queue(Path(launcher.params["submitit_folder"].partition("%")[0]), slurm)
    running = {job.path: there for job in jobs if (there := queue.find(job)) is not None}
    new = [job for job in jobs if job.path not in running]
    if new:
        with _submission(launcher.params):
            state = Singleton.get_state()  # with which the launcher is called in each job
            calls: list[tuple[Any, ...]] = [
                (job.number,) if work else (job.overrides, "hydra.sweep.dir", at, f"job_id_for_{at}", state)
                for at, job in enumerate(new, first)
            ]
            submitted = _executor(launcher).map_array(work or launcher, *zip(*calls, strict=True))
        for job, sent in zip(new, submitted, strict=True):
            queue.record(job).write_text(f"{sent.job_id} {sent.num_tasks}\n")
            running[job.path] = sent
    waited = [running[job.path] for job in jobs]
    try:
        for job, sent in zip(jobs, waited, strict=True):
            state = "submitted" if job in new else "still in the queue"
            output = sent.task(0).paths.stdout
            print(f"{job.label}: {state} as job {sent.job_id}; output: {output}", flush=True)
        return _wait(jobs, waited, queue, meanwhile)
    except KeyboardInterrupt:
        queue.cancel(waited)
        print(f"cancelled {len(waited)} jobs; each writes a checkpoint, and the same command resumes them")
        raise
    except Interrupted:
        if slurm:
            print("the jobs keep running; the same command waits for them again")
        else:
            queue.cancel(waited)
            with suppress(KeyboardInterrupt):
                _wait(jobs, waited, queue, lambda: None)
        raise


def _wait(
    jobs: Sequence[Job], submitted: Sequence[Submitted], queue: _Queue, meanwhile: Callable[[], None]
) -> list[JobReturn]:
    """Wait until all jobs have ended, and return a result for each job.

    Args:
        jobs: the jobs.
        submitted: the submitted job of each job.
        queue: the queue that reports results.
        meanwhile: called after each look at the queue.
    """
    results: dict[Job, JobReturn] = {}
    while True:
        for job, sent in zip(jobs, submitted, strict=True):
            if job not in results and (result := queue.result(sent)) is not None:
                results[job] = result
                state = "failed" if result.status is JobStatus.FAILED else "done"
                print(f"{job.label}: {state}" + (f", in {job.path}" if job.path.is_dir() else ""))
        meanwhile()
        if len(results) == len(jobs):
            return [results[job] for job in jobs]
        time.sleep(_POLL_S)


class _Queue:
    """A queue of submitted jobs, which reports whether a job runs and the result of each job.

    Args:
        folder: folder of submitit's files and of the files with job ids.
        slurm: whether the jobs are SLURM jobs; otherwise they are processes on this machine.
    """

    def __init__(self, folder: Path, slurm: bool) -> None:
        self.folder = folder.absolute()
        self.slurm = slurm
        self.known: set[str] = set()  # ids of this user's jobs that squeue listed last
        self.asked_at = -_ASK_SLURM_S  # time.monotonic() of the last successful squeue
        self.missing_since: dict[str, float] = {}  # job id -> time.monotonic(), for ended jobs without result

    def record(self, job: Job) -> Path:
        """Return the file that stores the id of a job, for a later call of the same sweep."""
        return self.folder / f"{job.path.name}.job"

    def find(self, job: Job) -> Submitted | None:
        """Return the SLURM job of an earlier call for `job`, if it is still in the queue; else None."""
        if not self.slurm or not self.record(job).is_file():
            return None
        from submitit import SlurmJob

        name, tasks = self.record(job).read_text().split()
        self.ask_slurm()
        if name not in self.known:
            return None
        return SlurmJob(folder=self.folder / "%j", job_id=name, tasks=list(range(int(tasks))))

    def ask_slurm(self) -> None:
        """Update `known` with squeue, at most every `_ASK_SLURM_S`; if squeue fails, keep `known`."""
        if time.monotonic() - self.asked_at < _ASK_SLURM_S:
            return
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            self.known = set(answer.stdout.split())
            self.asked_at = time.monotonic()

    def result(self, sent: Submitted) -> JobReturn | None:
        """Return the result that a job's first rank wrote; None while the job runs.

        A job that ended without a result file counts as failed.
        """
        result = sent.task(0).paths.result_pickle
        if result.is_file():
            with suppress(EOFError), result.open("rb") as stream:
                outcome, value = pickle.load(stream)
                return value if outcome == "success" else failed(RunError(_failure(str(value), sent)))
            return None
        if self.alive(sent):
            self.missing_since.pop(sent.job_id, None)
            return None
        missing_since = self.missing_since.setdefault(sent.job_id, time.monotonic())
        if time.monotonic() - missing_since < (_LINGER_S if self.slurm else _POLL_S):
            return None
        return failed(RunError(_failure("the job ended without a result (killed, or out of memory)", sent)))

    def alive(self, sent: Submitted) -> bool:
        """Return whether a job is running or queued.

        If squeue fails, a SLURM job counts as running.
        """
        if not self.slurm:
            return not sent.done()
        self.ask_slurm()
        return sent.job_id in self.known or time.monotonic() - self.asked_at > _ASK_SLURM_S

    def cancel(self, submitted: Sequence[Submitted]) -> None:
        """Send SIGTERM to jobs; each job writes a checkpoint and ends."""
        if self.slurm:
            subprocess.run(["scancel", *(sent.job_id for sent in submitted)])
            return
        for sent in submitted:
            if not sent.done():
                os.kill(int(sent.job_id), signal.SIGTERM)  # submitit's controller process forwards SIGTERM


def _executor(launcher: BaseSubmititLauncher) -> Any:
    """Return submitit's executor with the settings of `hydra.launcher`."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from submitit import AutoExecutor

    kind, settings = submitit_executor(launcher), dict(launcher.params)
    folder, timeouts = settings.pop("submitit_folder"), settings.pop("max_num_timeout", 0)
    made = AutoExecutor(folder=folder, cluster=kind, **{f"{kind}_max_num_timeout": timeouts})
    general = {str(key) for key in OmegaConf.structured(BaseQueueConf)}  # keys of every executor
    made.update_parameters(**{k if k in general else f"{kind}_{k}": each for k, each in settings.items()})
    return made


@contextmanager
def _submission(settings: dict[str, Any]) -> Iterator[None]:
    """Submit jobs in this context, by processes that ignore Ctrl-C; `_Queue.cancel` stops them.

    The SBATCH_ variables of keys that `hydra.launcher` sets are hidden, because sbatch prefers the variables.

    Raises:
        UserError: SLURM rejects the jobs.
    """
    hidden = {
        name: os.environ.pop(name)
        for key, value in settings.items()
        if value is not None and (name := f"SBATCH_{_SBATCH_NAMES.get(key, key.upper())}") in os.environ
    }
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except Exception as error:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        if not isinstance(error, FailedJobError | FailedSubmissionError):
            raise
        got, remedy = " ".join(str(error).split()), "change hydra.launcher.<key> or launchers/site.sh"
        raise UserError(f"hydra.launcher must be what SLURM accepts, got: {got}; {remedy}") from None
    finally:
        signal.signal(signal.SIGINT, before)
        os.environ.update(hidden)


def _failure(text: str, sent: Submitted) -> str:
    """Return the last line of `text` with the job id and the file that has the details."""
    last = text.strip().splitlines()[-1]
    errors = sent.task(0).paths.stderr
    return f"job {sent.job_id}: {last}; see {errors if errors.is_file() else sent.task(0).paths.stdout}"
