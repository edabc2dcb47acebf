"""Checks before a run or a sweep: the config of every job, the machine, and the existing run folder.

Hydra creates the run folder before it calls the task function. These checks are a Hydra callback, so that a
rejected run leaves no folder behind. This module imports no torch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import overrides_of, refuse, warn, warnings
from rlhf.checks.machine import Job, selected
from rlhf.config.best_generator import SELECTED, candidates
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.experiment import Experiment
from rlhf.launch.command_line import stop
from rlhf.launch.hydra_internals import combinations, submits_to_slurm, uses_basic_sweeper
from rlhf.launch.jobs import announce, distinct_overrides, experiment_of
from rlhf.launch.search_space import check_search, is_search, parsed_overrides, search_space
from rlhf.runs.folder import RunFolder

if TYPE_CHECKING:
    from rlhf.config.root import Config


@contextmanager
def _ends_command() -> Iterator[None]:
    """End the command at an unexpected error. Hydra would only warn of an error in a callback, and go on.

    Raises:
        SystemExit: with code 1 and a traceback, if the block raises an exception.
    """
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class Preflight(Callback):
    """Hydra callback that rejects an invalid run or sweep, and ends the command if the run is finished."""

    @_ends_command()
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check a single run: its config, the machine and its run folder.

        Raises:
            SystemExit: with code 2 if a check fails, with code 0 if the run is already finished. With
                `push_to`, a finished run first uploads its model; code 1 if that fails.
        """
        try:
            overrides = overrides_of(config.hydra.overrides)
            experiment = Experiment.composed(config, overrides)
            experiment.validate()
            experiment.files = RunFolder(Path(config.hydra.run.dir))  # it depends on valid keys
            warn(experiment.warnings())
            finished = experiment.prepare()
        except UserError as error:
            refuse(error.problems)
        for note in experiment.notes() if is_first_rank() else ():
            print(f"note: {note}")
        if finished is not None:
            announce(experiment.files, finished, experiment.config.metric)
            try:
                experiment.push()
            except (UserError, RunError) as error:
                stop(error)
            raise SystemExit(0)

    @_ends_command()
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the config of every job of a sweep before the first job starts.

        Raises:
            SystemExit: with code 2 if the config of a job is invalid.
        """
        problems = list(folders_outside(config))
        doubts: list[str] = []
        try:
            check_search(config.hydra.sweeper)
            jobs = sweep_jobs(config)
        except UserError as error:
            refuse([*problems, *error.problems])
        os.environ[SELECTED] = generator_of_jobs(config, jobs)  # for this process and the jobs
        for number, (overrides, distinct) in enumerate(zip(jobs, distinct_overrides(jobs), strict=True), 1):
            label = distinct or "every job"
            try:
                experiment = experiment_of(config, overrides, number)
                experiment.validate()
            except UserError as error:
                problems += [f"{label}: {problem}" for problem in error.problems]
            else:
                wrong = [*_wrong_direction(config, experiment.config), *_uploads(experiment.config)]
                problems += [f"{label}: {problem}" for problem in wrong]
                doubts += [f"{label}: {warning}" for warning in warnings(experiment.config)]
        if problems:
            refuse(problems)
        warn(doubts)


def _uploads(cfg: Config) -> Iterator[str]:
    """Yield an error if the job of a sweep uploads its model."""
    if cfg.push_to is not None:
        yield (
            "push_to must be null in a sweep (each job would upload its model, the best and the worst), got "
            f"{cfg.push_to}; leave it out, and run the command of the best job again with push_to"
        )


def folders_outside(config: DictConfig) -> Iterator[str]:
    """Yield an error if the run folders of a sweep are not below its folder."""
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    subdir = str(sweep["subdir"])
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        yield (
            "hydra.sweep.subdir must be a path below hydra.sweep.dir (the folder of the sweep), got "
            f"{subdir}; set hydra.sweep.dir=<folder>"
        )


def _wrong_direction(config: DictConfig, cfg: Config) -> Iterator[str]:
    """Yield an error if a search maximises a metric whose lower values are better."""
    direction = str(config.hydra.sweeper.get("direction", "")).rpartition(".")[2]
    if cfg.minimised and direction == "maximize":
        yield (
            f"hydra.sweeper.direction must be minimize for {cfg.metric} (lower values are better), got "
            "maximize; set hydra.sweeper.direction=minimize"
        )


def generator_of_jobs(config: DictConfig, jobs: Sequence[list[str]]) -> str:
    """Return the generator that `generator=auto` selects for all jobs of a sweep.

    All jobs have the same generator, so that they can be compared. For SLURM jobs, the GPUs of their nodes
    count: the machine that submits them may have no GPU, and the name of a run contains its generator.

    Args:
        config: the config of the sweep.
        jobs: overrides of each job.
    """
    launcher = config.hydra.launcher
    of_node: tuple[int, int] | tuple[()] = ()
    if submits_to_slurm(config):
        ranks = launcher.tasks_per_node
        of_node = (launcher.gpus_per_node or ranks * (launcher.gpus_per_task or 0), ranks)
    loader = GlobalHydra.instance().config_loader()

    def composed() -> Iterator[Job]:
        for overrides in jobs:
            yield loader.load_sweep_config(config, overrides), overrides

    return selected(candidates(*of_node), composed)


def sweep_jobs(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job of a sweep.

    If the sweeper chooses values during the sweep, the result is one job: of a search, a job in the middle of
    the search space; of another sweeper, a job without the swept overrides.

    Raises:
        UserError: the search space is invalid.
    """
    if is_search(config.hydra.sweeper):
        return [search_space(config).example]
    if uses_basic_sweeper(config):
        return combinations(parsed_overrides(config, config.hydra.sweeper.params))
    return [[each.input_line or "" for each in parsed_overrides(config) if not each.is_sweep_override()]]
