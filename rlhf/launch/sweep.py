"""Sweeps (`-m`): run only unfinished jobs, continue if a job fails, and list the failed jobs at the end.

    sweeper (every combination, or search) -> Sweep -> launcher (in this process, joblib, submitit)

Sweep stands between Hydra's sweeper and its launcher, so that every launcher behaves alike. This module
imports no torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rlhf.config.run import Resume
from rlhf.core.console import console, say
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.output import print_error
from rlhf.launch.hydra_internals import (
    joblib_settings,
    launchers_wrapped_by,
    submitit_executor,
    uses_basic_sweeper,
)
from rlhf.launch.jobs import (
    Job,
    completed,
    distinct_overrides,
    experiment_of,
    failed,
    failure_message,
    finished_message,
)
from rlhf.launch.preflight import sweep_jobs
from rlhf.launch.sweep_table import lines, report_command
from rlhf.processes import signals
from rlhf.runs.resuming import refuse_another_run


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
        try:
            with launchers_wrapped_by(self._around):
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

    def _around(self, launcher: Launcher) -> Launcher:
        self.launcher = launcher
        return self

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config of the sweep. The launcher of the config is already set up."""
        self.config = config
        self.total = (
            len(sweep_jobs(config)) if uses_basic_sweeper(config) else config.hydra.sweeper.get("n_trials")
        )

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
        if len(self.jobs) > 1:
            console.print()
            command = report_command(self.jobs, Path(self.config.hydra.sweep.dir))
            for line in [*lines(self.jobs), f"compare: {command}"]:
                console.print(line, markup=False, soft_wrap=True)
        for line in self.conclusion:
            console.print(line, markup=False, soft_wrap=True)
        if not self.failures:
            return
        remedy = "the others are kept; the same command runs only missing jobs"
        print_error(f"error: {len(self.failures)} of {len(self.jobs)} jobs failed; {remedy}")
        for job in self.failures:
            print_error(f"  - {job.label}: {failure_message(job.error)}")
            if job.folder is not None:
                print_error(f"    {job.path}")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished, and return a result for every job.

        Jobs with the same run folder are run once.
        """
        labels = distinct_overrides(job_overrides, self.fixed)
        jobs = [
            Job(number=number, label=label or f"job {number}", overrides=list(overrides))
            for number, (overrides, label) in enumerate(
                zip(job_overrides, labels, strict=True), initial_job_idx + 1
            )
        ]
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
                say(f"{job.label}: {finished_message(job.path, done.return_value, job.metric)}")
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
        experiment = experiment_of(self.config, job.overrides, job.number)
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
            from rlhf.launch.submitit_jobs import submit

            return submit(self.launcher, jobs, first)
        with _waiting_for_jobs(self.launcher, len(jobs)):
            try:
                return self.launcher.launch([job.overrides for job in jobs], initial_job_idx=first)
            except Exception as error:  # joblib raises if one of its processes died
                lost = failed(RunError(f"the launcher stopped: {failure_message(error)}"))
                return [job.done or lost for job in jobs]


current: Sweep | None = None  # the sweep that this process runs


@contextmanager
def _waiting_for_jobs(launcher: Launcher, jobs: int) -> Iterator[None]:
    """After a signal during the block, in which joblib runs jobs, stop the jobs and wait for their end.

    The block has no effect with a launcher other than joblib.

    Raises:
        Interrupted: a signal was received.
    """
    settings, interruption = joblib_settings(launcher), signals.active
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
        raise Interrupted(
            f"interrupted by {interruption.cause}; each run wrote a checkpoint if training had begun; the "
            "same command resumes them",
            interruption.received,
        )


def _pass_on() -> None:
    """Send SIGTERM to the child processes in this process group; after Ctrl-C, it is not a second signal."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(child.pid) == os.getpgrp():
                child.send_signal(signal.SIGTERM)
