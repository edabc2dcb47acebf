"""Sweeps (`-m`): run only unfinished jobs, continue if a job fails, and list the failed jobs at the end.

    sweeper (every combination, or search) -> WatchedLauncher -> launcher (in this process, joblib, submitit)

WatchedLauncher stands between Hydra's sweeper and its launcher, so that every launcher behaves alike. This
module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rlhf.config.mistakes import explained
from rlhf.config.run import Resume
from rlhf.core import stages
from rlhf.core.console import console, say
from rlhf.core.errors import RunError, UserError
from rlhf.core.output import print_error
from rlhf.experiment import Experiment
from rlhf.launch.child_jobs import waiting_for_jobs
from rlhf.launch.hydra_internals import launchers_wrapped_by, submitit_executor, uses_basic_sweeper
from rlhf.launch.jobs import Job, completed, distinct_overrides, failed, failure_message, finished_message
from rlhf.launch.preflight import sweep_jobs
from rlhf.launch.sweep_table import Row, lines, report_command
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import refuse_another_run


class Sweep:
    """A record of one sweep: its jobs and the failed jobs.

    Attributes:
        rows: the jobs that the sweeper has passed to the launcher so far.
        total: number of jobs of the whole sweep; None: not known.
        folder: folder of the run folders.
        failures: label, run folder (None if the config is invalid) and error of each failed job.
        fixed: the overrides that all jobs share, if the sweeper sets them; they are not in labels.
        conclusion: lines that the sweeper wants to have below the table.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.total: int | None = None
        self.folder: str | None = None
        self.failures: list[tuple[str, RunFolder | None, BaseException]] = []
        self.fixed: Sequence[str] | None = None
        self.conclusion: list[str] = []

    @property
    def jobs(self) -> int:
        """The number of jobs that the sweeper has passed to the launcher so far."""
        return len(self.rows)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let Hydra launch jobs through a `WatchedLauncher`; in this process, `job_title` knows the sweep."""
        global current
        current = self
        try:
            with launchers_wrapped_by(lambda launcher: WatchedLauncher(launcher, self)):
                yield
        finally:
            current = None

    def report(self) -> None:
        """Print the table of two or more jobs, the conclusion of the sweeper, and the failed jobs."""
        if self.jobs > 1:
            console.print()
            for line in lines(self.rows):
                console.print(line, markup=False, soft_wrap=True)
            command = report_command(self.rows, Path(str(self.folder)))
            console.print(f"compare: {command}", markup=False, soft_wrap=True)
        for line in self.conclusion:
            console.print(line, markup=False, soft_wrap=True)
        if not self.failures:
            return
        remedy = "the others are kept; the same command runs only missing jobs"
        print_error(f"error: {len(self.failures)} of {self.jobs} jobs failed; {remedy}")
        for label, folder, error in self.failures:
            print_error(f"  - {label}: {failure_message(error)}")
            if folder is not None:
                print_error(f"    {folder.path}")

    def end(self) -> None:
        """Print the table and the failed jobs, and end the command if a job failed.

        Raises:
            SystemExit: with code 2 if every failure is invalid input or configuration, else with code 1.
        """
        self.report()
        if self.failures:
            raise SystemExit(2 if all(isinstance(error, UserError) for *_, error in self.failures) else 1)

    def explains(self, error: BaseException) -> bool:
        """Return whether failed jobs are the cause of an error of the sweeper.

        A sweeper may raise the error of a job again, or its own error if all jobs failed.
        """
        return any(error is failure for *_, failure in self.failures) or 0 < self.jobs == len(self.failures)


current: Sweep | None = None  # the sweep that this process runs


def job_title(number: int, overrides: Sequence[str]) -> str:
    """Return the title of a job, such as "job 1 of 4: seed=1".

    In the process of the sweep, the title has the number of jobs, and only the overrides that differ.

    Args:
        number: number of the job among the jobs that run, from 0.
        overrides: overrides of the job.
    """
    rows = [] if current is None else current.rows
    row = next((row for row in rows if row.overrides == tuple(overrides)), None)
    if current is None or row is None:
        return f"job {number + 1}: {' '.join(overrides)}"
    of = f" of {current.total}" if current.total is not None and row.number <= current.total else ""
    return f"job {row.number}{of}: {row.label}"


def begin_job(number: int, overrides: Sequence[str]) -> None:
    """Print the title of a job; in a process for jobs, titles then begin with the number of the job.

    Args:
        number: number of the job among the jobs that run, from 0.
        overrides: overrides of the job.
    """
    console.print(job_title(number, overrides), markup=False, style="bold")
    stages.job = "" if current is not None else f"job {number + 1} "


class WatchedLauncher(Launcher):
    """A launcher that passes unfinished jobs to another launcher, and returns a result for every job."""

    def __init__(self, launcher: Launcher, sweep: Sweep) -> None:
        self.launcher = launcher
        self.sweep = sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config and its loader for `compose`. The wrapped launcher is already set up."""
        self.loader = hydra_context.config_loader
        self.config = config
        self.hide_failures = uses_basic_sweeper(config)  # this sweeper stops at a failed job
        self.sweep.folder = config.hydra.sweep.dir
        self.sweep.total = (
            len(sweep_jobs(config)) if uses_basic_sweeper(config) else config.hydra.sweeper.get("n_trials")
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished, and return a result for every job.

        Jobs with the same run folder are run once.
        """
        jobs: list[Job | JobReturn] = []
        results: dict[Path, JobReturn] = {}
        due: dict[Path, Job] = {}
        rows: dict[Path, Row] = {}
        for number, (overrides, distinct) in enumerate(
            zip(job_overrides, distinct_overrides(job_overrides, self.sweep.fixed), strict=True),
            initial_job_idx,
        ):
            label = distinct or f"job {number + 1}"
            row = Row(number=number + 1, label=label, overrides=tuple(overrides))
            self.sweep.rows.append(row)
            try:
                job, resume = self.compose(number, list(overrides), label)
                done = None if resume is Resume.never else job.done
            except UserError as error:
                row.failed = True
                self.sweep.failures.append((label, None, error))
                jobs.append(failed(error))
                continue
            jobs.append(job)
            row.folder, row.metric = job.folder, job.metric
            path = job.folder.path
            if path in due:
                row.status = f"same run as job {rows[path].number}"
                say(f"{label}: the same run as {due[path].label} (their run folder is the same)")
            elif done is not None:
                row.status = "finished before"
                say(f"{label}: {finished_message(job.folder, done.return_value, job.metric)}")
                results[path] = done
            else:
                due[path], rows[path] = job, row
        if due:
            results.update(zip(due, self.run(list(due.values()), initial_job_idx), strict=True))
        for path, job in due.items():
            if results[path].status is JobStatus.FAILED:
                rows[path].failed = True
                self.sweep.failures.append((job.label, job.folder, results[path]._return_value))
        returns = [results[job.folder.path] if isinstance(job, Job) else job for job in jobs]
        if self.hide_failures:
            return [completed(None) if result.status is JobStatus.FAILED else result for result in returns]
        return returns

    def run(self, jobs: list[Job], first: int) -> Sequence[JobReturn]:
        """Run `jobs` with the wrapped launcher, and return a result for each job.

        Args:
            jobs: the jobs to run.
            first: number of the first job.
        """
        if submitit_executor(self.launcher) is not None:
            from rlhf.launch.submitit_jobs import submit

            return submit(self.launcher, jobs, first)
        with waiting_for_jobs(self.launcher, len(jobs)):
            try:
                return self.launcher.launch([job.overrides for job in jobs], initial_job_idx=first)
            except Exception as error:  # joblib raises if one of its processes died
                reason = f"the launcher stopped: {failure_message(error)}"
                return [job.done or failed(RunError(reason)) for job in jobs]

    def compose(self, number: int, overrides: list[str], label: str) -> tuple[Job, Resume]:
        """Return a job and its `resume` setting, from the config that the launcher will compose for the job.

        Raises:
            UserError: the config is invalid, for example because the sweeper chose an invalid value.
        """
        with explained(overrides):
            config = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            folder = RunFolder(Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir)
            experiment = Experiment.composed(config, overrides, folder.path)
            experiment.validate()
            cfg = experiment.config
            if cfg.resume is not Resume.never:
                refuse_another_run(cfg, folder)
        return Job(overrides, folder, cfg.metric, label), cfg.resume
