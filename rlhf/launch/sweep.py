"""Sweeps (`-m`): run only unfinished jobs, continue if a job fails, and list the failed jobs at the end.

    sweeper (every combination, or Optuna) -> WatchedLauncher -> launcher (in this process, joblib, submitit)

WatchedLauncher stands between Hydra's sweeper and its launcher, so that every launcher behaves alike. This
module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rlhf.checks.check import typed
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.run import Resume
from rlhf.core.errors import RunError, UserError
from rlhf.launch.hydra_internals import launchers_wrapped_by, submitit_executor, uses_basic_sweeper
from rlhf.launch.jobs import Job, completed, distinct_overrides, failed, failure_message, finished_message
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import refuse_another_run


class Sweep:
    """A record of one sweep: the number of jobs and the failed jobs.

    Attributes:
        jobs: number of jobs that the sweeper has passed to the launcher so far.
        failures: label, run folder (None if the config is invalid) and error of each failed job.
    """

    def __init__(self) -> None:
        self.jobs = 0
        self.failures: list[tuple[str, RunFolder | None, BaseException]] = []

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which Hydra launches jobs through a `WatchedLauncher`."""
        return launchers_wrapped_by(lambda launcher: WatchedLauncher(launcher, self))

    def report(self) -> None:
        """Print the failed jobs."""
        if not self.failures:
            return
        remedy = "the others are kept; the same command runs only missing jobs"
        print(f"error: {len(self.failures)} of {self.jobs} jobs failed; {remedy}", file=sys.stderr)
        for label, folder, error in self.failures:
            print(f"  - {label}: {failure_message(error)}", file=sys.stderr)
            if folder is not None:
                print(f"    {folder.path}", file=sys.stderr)

    def end(self) -> None:
        """Print the failed jobs, and end the command if a job failed.

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

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished, and return a result for every job.

        Jobs with the same run folder are run once.
        """
        jobs: list[Job | JobReturn] = []
        results: dict[Path, JobReturn] = {}
        due: dict[Path, Job] = {}
        for number, (overrides, distinct) in enumerate(
            zip(job_overrides, distinct_overrides(job_overrides), strict=True), initial_job_idx
        ):
            label = distinct or f"job {number}"
            try:
                job, resume = self.compose(number, list(overrides), label)
                done = None if resume is Resume.never else job.done
            except UserError as error:
                self.sweep.failures.append((label, None, error))
                jobs.append(failed(error))
                continue
            jobs.append(job)
            path = job.folder.path
            if path in due:
                print(f"{label}: the same run as {due[path].label} (their run folder is the same)")
            elif done is not None:
                print(f"{label}: {finished_message(job.folder, done.return_value, job.metric)}")
                results[path] = done
            else:
                due[path] = job
        self.sweep.jobs += len(jobs)
        if due:
            results.update(zip(due, self.run(list(due.values()), initial_job_idx), strict=True))
        for path, job in due.items():
            if results[path].status is JobStatus.FAILED:
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
        try:
            config = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            folder = RunFolder(Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir)
            cfg = typed(config, overrides)
            if cfg.resume is not Resume.never:
                refuse_another_run(cfg, folder)
        except UserError:
            raise
        except CONFIG_ERRORS as error:
            raise UserError(explain(error, overrides)) from error
        return Job(overrides, folder, cfg.metric, label), cfg.resume
