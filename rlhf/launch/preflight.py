"""Checks before a run or a sweep: its jobs, its search space, the machine, the run folders."""

from __future__ import annotations

import importlib.util
import math
import os
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.checks import machine
from rlhf.checks.check import overrides_of, refuse, warn, warnings
from rlhf.checks.machine import selected
from rlhf.config.root import SELECTED, candidates
from rlhf.config.run import SEARCH_SWEEPER, SearchConfig
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import is_first_rank
from rlhf.experiment import Experiment
from rlhf.launch.command_line import combinations, stop, submits_to_slurm, uses_basic_sweeper
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import folder_of, twice_as_long
from rlhf.stages.artefacts import again, model_problem
from rlhf.words.mistakes import explained

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from rlhf.config.root import Config


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

    def composed() -> Iterator[machine.Job]:
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
        state = None if self.folder is None else self.folder.read_state()
        if state is None or not state.get("finished"):
            return "unfinished" if state is None else state.get("stopped", "unfinished")
        return "finished"

    @property
    def done(self) -> JobReturn | None:
        """The result of the run if it is finished, else None."""
        state = None if self.folder is None or self.error is not None else self.folder.finished()
        return None if state is None else completed(state["result"].get(self.metric))

    @property
    def result(self) -> float | None:
        """The final value of the metric; None if the run is not finished."""
        return None if (done := self.done) is None else done.return_value


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
    if problem := model_problem(folder):
        print(f"warning: {problem}; {again(folder)}")
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


# The search space of a search: the swept overrides, as distributions of Optuna.
#
#     optim.lr=tag(log,interval(1e-5,1e-2))   FloatDistribution(log=True)
#     schedule.epochs=range(1,4)              IntDistribution: 1, 2 or 3
#     algo.beta=0.1,0.2                       CategoricalDistribution
#
# This module imports no torch, and Optuna only in functions.


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The overrides of a search.

    Attributes:
        fixed: the overrides that all trials share.
        distributions: the distribution of each swept key.
    """

    fixed: list[str]
    distributions: dict[str, BaseDistribution]

    @property
    def example(self) -> list[str]:
        """The overrides of a trial in the middle of the space."""
        return [*self.fixed, *overrides({key: middle(each) for key, each in self.distributions.items()})]


def is_search(sweeper: DictConfig) -> bool:
    """Return whether `hydra.sweeper` is that of `hydra/sweeper=search`."""
    return bool(sweeper._target_ == SEARCH_SWEEPER)


def check_search(sweeper: DictConfig) -> None:
    """Check the settings of a search in `hydra.sweeper`; another sweeper is not checked.

    Raises:
        UserError: Optuna is not installed, or a setting is invalid.
    """
    if not is_search(sweeper):
        return
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "hydra/sweeper=search needs Optuna (it proposes the values), which is not installed; run: pip "
            "install -e '.[optuna]', or leave hydra/sweeper=search out"
        )
    if problems := list(settings_of(sweeper).problems("hydra.sweeper")):
        raise UserError(*problems)


def settings_of(sweeper: DictConfig) -> SearchConfig:
    """Return the settings of a search from `hydra.sweeper`."""
    settings = OmegaConf.to_object(sweeper)
    assert isinstance(settings, SearchConfig)
    return settings


def parsed_overrides(config: DictConfig, params: Mapping[str, Any] | None = None) -> list[Override]:
    """Return the overrides of a sweep: `params`, which are those of its recipe, then the command line."""
    words = [f"{key}={value}" for key, value in (params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*words, *overrides_of(config.hydra.overrides)])


def search_space(config: DictConfig) -> SearchSpace:
    """Return the search space of `hydra.sweeper.params` and of the command line, which takes precedence.

    Raises:
        UserError: no key is swept, or an interval is invalid.
    """
    last = {each.get_key_element(): each for each in parsed_overrides(config, config.hydra.sweeper.params)}
    swept = {key: each for key, each in last.items() if each.is_sweep_override()}
    if not swept:
        raise UserError(
            "hydra/sweeper=search needs a key with several values (the search space), got none; add for "
            "example 'optim.lr=tag(log,interval(1e-5,1e-2))'"
        )
    fixed = [each.input_line or "" for key, each in last.items() if key not in swept]
    return SearchSpace(fixed, {key: distribution(each) for key, each in swept.items()})


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a swept override.

    Raises:
        UserError: the interval is invalid, or the range is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    try:
        if override.is_interval_sweep():
            whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
            kind = IntDistribution if whole else FloatDistribution
            return kind(sweep.start, sweep.end, log="log" in sweep.tags)
        if override.is_range_sweep():
            low, high, step = bounds(sweep)
            if all(isinstance(each, int) for each in (sweep.start, sweep.stop, sweep.step)):
                return IntDistribution(int(low), int(high), step=int(step))
            return FloatDistribution(float(low), float(high), step=float(step))
    except ValueError as error:
        raise UserError(
            f"{override.key_or_group} must have valid bounds ({error}), got {override.input_line}; "
            "correct the bounds"
        ) from None
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def bounds(sweep: RangeSweep) -> tuple[Decimal, Decimal, Decimal]:
    """Return the smallest and the largest value of a range, and its step, as exact decimal numbers.

    Raises:
        ValueError: the range is empty.
    """
    count = len(list(sweep.range()))
    if not count:
        raise ValueError("the range has no value")
    first, step = Decimal(str(sweep.start)), Decimal(str(sweep.step))
    low, high = sorted((first, first + (count - 1) * step))
    return low, high, abs(step)


def middle(found: BaseDistribution) -> Any:
    """Return the value in the middle of a distribution; of a list, the first value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(found, CategoricalDistribution):
        return found.choices[0]
    assert isinstance(found, FloatDistribution | IntDistribution)
    if found.log:
        value = math.sqrt(found.low * found.high)
    elif found.step:
        return found.low + round((found.high - found.low) / found.step / 2) * found.step
    else:
        value = (found.low + found.high) / 2
    return round(value) if isinstance(found, IntDistribution) else value


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as overrides; numbers are rounded to six significant digits."""
    return [f"{key}={f'{value:.6g}' if isinstance(value, float) else value}" for key, value in values.items()]
