"""Checks before a run or a sweep: its jobs, the machine, the run folders."""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.checks import check
from rlhf.checks.check import overrides_of, refuse, warn, warnings
from rlhf.config.root import SELECTED, Config, candidates
from rlhf.config.run import SEARCH_SWEEPER
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.experiment import Experiment
from rlhf.launch.command_line import combinations, parsed_overrides, stop, uses_basic_sweeper
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import folder_of, twice_as_long
from rlhf.words.mistakes import explained

# Checks before a run or a sweep: the config of every job, the machine, and the existing run folder.
#
# Hydra creates the run folder before it calls the task function. These checks are a Hydra callback, so that
# a rejected run leaves no folder behind.


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
            if is_search(config.hydra.sweeper):
                _check_search(config.hydra.sweeper)
            jobs = sweep_jobs(config)
        except UserError as error:
            refuse([*problems, *error.problems])
        os.environ[SELECTED] = generator_of_jobs(config, jobs)  # for this process and the jobs
        for number, (overrides, distinct) in enumerate(zip(jobs, distinct_overrides(jobs), strict=True), 1):
            label = distinct or "every job"
            try:
                experiment = experiment_of(config, overrides, number)
                experiment.validate()
                found = tuple(_problems_of_job(config, experiment.config))
                doubts += [f"{label}: {warning}" for warning in warnings(experiment.config)]
            except UserError as error:
                found = error.problems
            problems += [f"{label}: {problem}" for problem in found]
        if problems:
            refuse(problems)
        warn(doubts)


def folders_outside(config: DictConfig) -> Iterator[str]:
    """Yield an error if the run folders of a sweep are not below its folder."""
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    subdir = str(sweep["subdir"])
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        rule = "must be a path below hydra.sweep.dir (the folder of the sweep)"
        yield f"hydra.sweep.subdir {rule}, got {subdir}; set hydra.sweep.dir=<folder>"


def _problems_of_job(config: DictConfig, cfg: Config) -> Iterator[str]:
    """Yield an error if a job uploads its model, or if a search maximises a metric to be minimised."""
    if cfg.push_to is not None:
        rule = "push_to must be null in a sweep (each job would upload its model, the best and the worst)"
        remedy = "leave it out, and run the command of the best job again with push_to"
        yield f"{rule}, got {cfg.push_to}; {remedy}"
    direction = str(config.hydra.sweeper.get("direction", "")).rpartition(".")[2]
    if cfg.minimised and direction == "maximize":
        rule = f"hydra.sweeper.direction must be minimize for {cfg.metric} (lower values are better)"
        yield f"{rule}, got maximize; set hydra.sweeper.direction=minimize"


def is_search(sweeper: DictConfig) -> bool:
    """Return whether `hydra.sweeper` is that of `hydra/sweeper=search`."""
    return bool(sweeper._target_ == SEARCH_SWEEPER)


def _check_search(sweeper: DictConfig) -> None:
    """Raise UserError if Optuna is not installed, or a setting of a search is invalid."""
    if importlib.util.find_spec("optuna") is None:
        remedy = "run: pip install -e '.[optuna]', or leave hydra/sweeper=search out"
        raise UserError(f"hydra/sweeper=search needs Optuna, got a machine without it; {remedy}")
    settings: Any = OmegaConf.to_object(sweeper)
    if problems := list(settings.problems("hydra.sweeper")):
        raise UserError(*problems)


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
    if str(launcher._target_).endswith(".SlurmLauncher"):
        ranks = launcher.tasks_per_node
        of_node = (launcher.gpus_per_node or ranks * (launcher.gpus_per_task or 0), ranks)
    compose = GlobalHydra.instance().config_loader().load_sweep_config
    return check.selected(candidates(*of_node), lambda: ((compose(config, job), job) for job in jobs))


def sweep_jobs(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job of a sweep.

    If the sweeper chooses values during the sweep, the result is one job: of a search, a job in the middle of
    the search space; of another sweeper, a job without the swept overrides.

    Raises:
        UserError: the search space is invalid.
    """
    if is_search(config.hydra.sweeper):
        from rlhf.launch.search import search_space

        return [search_space(config).example]
    if uses_basic_sweeper(config):
        return combinations(config)
    return [[each.input_line or "" for each in parsed_overrides(config) if not each.is_sweep_override()]]


# Jobs of a sweep: their overrides, configs, run folders and results.


OmegaConf.register_new_resolver("run_name", lambda *, _root_: folder_of(_root_).name, replace=True)  # conf/


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One run of a sweep.

    Attributes:
        number: number of the job, from 1.
        label: the overrides that not all jobs share.
        overrides: the overrides of the job.
        folder: the run folder; None if the config of the job is invalid.
        metric: name of the metric that a sweeper optimises.
        status: why the job does not run: "finished before", or "same run as job <number>".
        error: the error of a failed job.
    """

    number: int
    label: str
    overrides: list[str] = field(default_factory=list)
    folder: RunFolder | None = None
    metric: str = ""
    status: str | None = None
    error: BaseException | None = None

    @property
    def path(self) -> Path:
        """The path of the run folder, for a job with a valid config."""
        assert self.folder is not None
        return self.folder.path

    @property
    def state(self) -> str:
        """The state of the job: failed, finished, unfinished, or why a hook stopped it, such as pruned."""
        if self.error is not None:
            return "failed"
        if self.status is not None:
            return self.status
        state = (self.folder.read_state() if self.folder else None) or {}
        return "finished" if state.get("finished") else state.get("stopped", "unfinished")

    @property
    def done(self) -> JobReturn | None:
        """The result of the run, with the final value of the metric, if it is finished; else None."""
        state = None if self.folder is None or self.error is not None else self.folder.finished()
        return None if state is None else completed(state["result"].get(self.metric))


def experiment_of(config: DictConfig, overrides: Sequence[str], number: int) -> Experiment:
    """Return the run of a job of a sweep. Hydra must be initialized.

    Args:
        config: the config of the sweep.
        overrides: the overrides of the job.
        number: number of the job, from 1.

    Raises:
        UserError: the config does not compose, or a key is unknown or has a value of the wrong type.
    """
    with explained(overrides):
        node = GlobalHydra.instance().config_loader().load_sweep_config(config, list(overrides))
        with open_dict(node):
            node.hydra.job.id = node.hydra.job.num = number - 1
        experiment = Experiment.composed(node, overrides)
        experiment.files = RunFolder(Path(node.hydra.sweep.dir) / node.hydra.sweep.subdir)
    return experiment


def distinct_overrides(jobs: Sequence[Sequence[str]], shared: Collection[str] | None = None) -> list[str]:
    """Return, for each job, the overrides that not all jobs share, joined by spaces; "" if all are shared.

    Args:
        jobs: the overrides of each job.
        shared: the overrides that all jobs share; None: those of two or more `jobs` with the same text.
    """
    if shared is None:
        shared = set(jobs[0]).intersection(*jobs[1:]) if len(jobs) > 1 else set()
    return [" ".join(override for override in job if override not in shared) for job in jobs]


def announce(folder: RunFolder, state: dict[str, Any], metric: str) -> None:
    """Print on rank 0 that a run is finished, with the value of `metric`, the model and possible commands.

    Args:
        folder: the run folder.
        state: the content of trainer_state.json.
        metric: name of the metric.
    """
    if not is_first_rank():
        return
    print(finished_message(folder.path, state["result"].get(metric), metric))
    if problem := folder.model_problem():
        print(f"warning: {problem}; {folder.again()}")
    else:
        print(f"model: {folder.model}")
    print("to run again: add resume=never")
    if folder.last_checkpoint() is not None and (command := twice_as_long(folder)):
        print(f"to train longer: {command}")


def finished_message(folder: Path, value: float | None, metric: str) -> str:
    """Return the message about a run that is already finished; `value` is the value of `metric`."""
    return f"finished already: {folder}" + ("" if value is None else f" ({metric} {value:.4g})")


def completed(value: float | None) -> JobReturn:
    """Return the result of a completed job; `value` is the metric that a sweeper optimises."""
    return JobReturn(_return_value=value, status=JobStatus.COMPLETED)


def failed(error: BaseException) -> JobReturn:
    """Return the result of a failed job."""
    return JobReturn(_return_value=error, status=JobStatus.FAILED)


def failure_message(error: BaseException | None) -> str:
    """Return the message of an error that ended a job, with the class name of an unexpected error."""
    if isinstance(error, UserError | RunError):
        return str(error).removeprefix("error: ")
    return f"{type(error).__name__}: {error}"
