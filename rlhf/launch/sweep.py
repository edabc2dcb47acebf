"""A sweep (`-m`): starts only the jobs that are not done, goes on when one fails, tells at its end which did.

    sweeper (every combination, or Optuna) -> WatchedLauncher -> launcher (here, joblib, submitit, SLURM)

Every launcher gets the same treatment, as this stands between Hydra's sweeper and its launcher. Imports no
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rlhf.checks.check import typed
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.config.run import Resume
from rlhf.core.errors import RunError, UserError
from rlhf.launch.jobs import BASIC_SWEEPER, Job, found_finished, gave, in_words, own_words, raised
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import refuse_another_run


class Sweep:
    """What became of the jobs of a sweep."""

    def __init__(self) -> None:
        self.jobs = 0
        self.failures: list[tuple[str, RunFolder | None, BaseException]] = []  # label, folder, error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have Hydra launch through a WatchedLauncher; it has no hook between sweeper and launcher."""
        own = Plugins.instantiate_launcher

        def instantiate(plugins: Plugins, *, config: DictConfig, **others: Any) -> Launcher:
            launcher = WatchedLauncher(own(plugins, config=config, **others), self)
            launcher.setup(config=config, **others)
            return launcher

        Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Plugins.instantiate_launcher = own  # type: ignore[method-assign]

    def tell(self) -> None:
        """Say which jobs failed."""
        if not self.failures:
            return
        text = "the others are kept, and the same command runs only what is missing"
        print(f"error: {len(self.failures)} of {self.jobs} jobs failed; {text}", file=sys.stderr)
        for label, folder, error in self.failures:
            print(f"  - {label}: {in_words(error)}", file=sys.stderr)
            if folder is not None:
                print(f"    {folder.path}", file=sys.stderr)

    def end(self) -> None:
        """Say which jobs failed, and end the command where some did.

        Raises:
            SystemExit: 2 where all are the user's to mend, else 1.
        """
        self.tell()
        if self.failures:
            raise SystemExit(2 if all(isinstance(error, UserError) for *_, error in self.failures) else 1)

    def knows(self, error: BaseException) -> bool:
        """Whether it is the error of a job, which a sweeper raised again, or about there being no other."""
        return any(error is failed for *_, failed in self.failures) or 0 < self.jobs == len(self.failures)


class WatchedLauncher(Launcher):
    """Gives a launcher the jobs that are due, and the sweeper an answer to each."""

    def __init__(self, launcher: Launcher, sweep: Sweep) -> None:
        self.launcher = launcher
        self.sweep = sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what jobs are composed with; the launcher has been set up."""
        self.loader = hydra_context.config_loader
        self.config = config
        self.optional = config.hydra.sweeper._target_ == BASIC_SWEEPER  # it stops at the first that failed

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not done; those that share a folder are one."""
        asked: list[Job | JobReturn] = []
        answers: dict[Path, JobReturn] = {}
        due: dict[Path, Job] = {}
        for number, (overrides, own) in enumerate(
            zip(job_overrides, own_words(job_overrides), strict=True), initial_job_idx
        ):
            label = own or f"job {number}"
            try:
                job, resume = self.compose(number, list(overrides), label)
                done = None if resume is Resume.never else job.done
            except UserError as error:
                self.sweep.failures.append((label, None, error))
                asked.append(raised(error))
                continue
            asked.append(job)
            path = job.folder.path
            if path in due:
                print(f"{label}: the same run as {due[path].label}, which it shares its folder with")
            elif done is not None:
                print(f"{label}: {found_finished(job.folder, done.return_value, job.metric)}")
                answers[path] = done
            else:
                due[path] = job
        self.sweep.jobs += len(asked)
        if due:
            answers.update(zip(due, self.run(list(due.values()), initial_job_idx), strict=True))
        for path, job in due.items():
            if answers[path].status is JobStatus.FAILED:
                self.sweep.failures.append((job.label, job.folder, answers[path]._return_value))
        returns = [answers[job.folder.path] if isinstance(job, Job) else job for job in asked]
        if self.optional:
            return [gave(None) if answer.status is JobStatus.FAILED else answer for answer in returns]
        return returns

    def run(self, jobs: list[Job], first: int) -> Sequence[JobReturn]:
        """Have the launcher run `jobs`, and hear what became of each."""
        if hasattr(self.launcher, "_EXECUTOR"):  # submitit's
            from rlhf.launch.submitit_jobs import submit

            return submit(self.launcher, jobs, first)
        try:
            return self.launcher.launch([job.overrides for job in jobs], initial_job_idx=first)
        except Exception as error:  # joblib's, where one of its processes died
            return [job.done or raised(RunError(f"the launcher stopped: {in_words(error)}")) for job in jobs]

    def compose(self, number: int, overrides: list[str], label: str) -> tuple[Job, Resume]:
        """A job as its launcher will compose it.

        Raises:
            UserError: it is wrong; a sweeper that chooses as it goes may choose so.
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
