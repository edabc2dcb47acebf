"""Hyperparameter searches with Optuna: `python -m rlhf.train -m hydra/sweeper=search`.

    sweeper (process of the command)             hook (process of the job)
    ask the study for the values of a trial
    launch the job                          -->  report each evaluation to the study
                                                 stop the run if the pruner of the study says so
    tell the study the result               <--  the objective metric

The study is a file below `output_dir`, or a database. The same command continues the study: a trial that was
interrupted or failed runs again, with its values. The search space consists of the swept overrides:

    optim.lr=tag(log,interval(1e-5,1e-2))   FloatDistribution(log=True)
    schedule.epochs=range(1,4)              IntDistribution: 1, 2 or 3
    algo.beta=0.1,0.2                       CategoricalDistribution

This module imports Optuna and no torch; other modules import it only for a search.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from optuna import Study, Trial, create_study, distributions, load_study, logging
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from rlhf.checks.check import as_objects
from rlhf.config.run import Direction, Pruner, Sampler, SearchConfig
from rlhf.core import files
from rlhf.core.errors import UserError
from rlhf.core.formatting import figure
from rlhf.core.launched import derive
from rlhf.core.state import TrainState
from rlhf.launch.command_line import parsed_overrides
from rlhf.loggers.logger import Hook, StopRun
from rlhf.runs.lock import locked
from rlhf.terminal.console import say
from rlhf.words.catalogue import config_dir_words
from rlhf.words.compose import digest

if TYPE_CHECKING:
    from rlhf.core.metrics import Row

logging.set_verbosity(logging.WARNING)

_PRUNED = "pruned"  # attribute of a pruned trial
_STEPS = 1000  # steps of a trial: all updates of its run; the runs of a search may differ in their updates


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The overrides of a search: those that all trials share, and the distribution of each swept key."""

    fixed: list[str]
    distributions: dict[str, distributions.BaseDistribution]

    @property
    def example(self) -> list[str]:
        """The overrides of a trial in the middle of the space; of a list, the first value."""
        values: dict[str, Any] = {}
        for key, found in self.distributions.items():
            if isinstance(found, CategoricalDistribution):
                values[key] = found.choices[0]
                continue
            assert isinstance(found, FloatDistribution | IntDistribution)
            value = math.sqrt(found.low * found.high) if found.log else (found.low + found.high) / 2
            if found.step and not found.log:
                value = found.low + round((found.high - found.low) / found.step / 2) * found.step
            values[key] = round(value) if isinstance(found, IntDistribution) else value
        return [*self.fixed, *overrides(values)]


def search_space(config: DictConfig) -> SearchSpace:
    """Return the search space of `hydra.sweeper.params` and of the command line, which takes precedence.

    Raises:
        UserError: no key is swept, an interval is invalid, or a range is empty.
    """
    last = {each.get_key_element(): each for each in parsed_overrides(config, config.hydra.sweeper.params)}
    swept = {key: each for key, each in last.items() if each.is_sweep_override()}
    if not swept:
        remedy = "add for example 'optim.lr=tag(log,interval(1e-5,1e-2))'"
        raise UserError(f"hydra/sweeper=search needs a key with several values, got none; {remedy}")
    fixed = [each.input_line or "" for key, each in last.items() if key not in swept]
    return SearchSpace(fixed, {key: distribution(each) for key, each in swept.items()})


def distribution(override: Override) -> distributions.BaseDistribution:
    """Return the distribution of a swept override.

    Raises:
        UserError: the interval is invalid, or the range is empty.
    """
    sweep: Any = override.value()
    try:
        if override.is_interval_sweep():
            whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
            kind = IntDistribution if whole else FloatDistribution
            return kind(sweep.start, sweep.end, log="log" in sweep.tags)
        if override.is_range_sweep():
            if not (count := len(list(sweep.range()))):
                raise ValueError("the range has no value")
            first, step = Decimal(str(sweep.start)), Decimal(str(sweep.step))  # exact
            low, high = sorted((first, first + (count - 1) * step))
            if all(isinstance(each, int) for each in (sweep.start, sweep.stop, sweep.step)):
                return IntDistribution(int(low), int(high), step=int(abs(step)))
            return FloatDistribution(float(low), float(high), step=float(abs(step)))
    except ValueError as error:
        raise UserError(
            f"{override.key_or_group} must have valid bounds ({error}), got {override.input_line}; "
            "correct the bounds"
        ) from None
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as overrides; numbers are rounded to six significant digits."""
    return [f"{key}={f'{value:.6g}' if isinstance(value, float) else value}" for key, value in values.items()]


class SearchSweeper(Sweeper):
    """A sweeper whose jobs are the trials of an Optuna study; `sweep` reads its settings from the config.

    Its launcher is a `rlhf.launch.sweep.Sweep`, which shows the shared overrides and the conclusion.
    """

    config: DictConfig
    hydra_context: HydraContext
    launcher: Any

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config of the sweep, and make its launcher."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials that the study lacks, and write the best values to `optimization_results.yaml`.

        Args:
            arguments: overrides of the command line.

        Raises:
            UserError: the storage cannot be used, or the study belongs to another search.
        """
        settings: Any = OmegaConf.to_object(self.config.hydra.sweeper)
        space = search_space(self.config)
        example = self.hydra_context.config_loader.load_sweep_config(self.config, space.example)
        cfg = as_objects(example, space.example)
        best = settings.direction or (Direction.minimize if cfg.minimised else Direction.maximize)
        as_json = distributions.distribution_to_json
        definition = {  # what identifies a search
            "runs": digest(cfg),
            "objective_metric": cfg.metric,
            "direction": best.value,
            "space": {key: json.loads(as_json(each)) for key, each in space.distributions.items()},
        }
        name = settings.study_name or f"{cfg.task.name}-{cfg.algo.name}-{files.digest(definition)}"
        if settings.study_name is None:  # each job is composed again, from the overrides
            with read_write(self.config), open_dict(self.config):
                self.config.hydra.overrides.hydra.append(f"hydra.sweeper.study_name={name}")
        folder = Path(self.config.hydra.sweep.dir)
        file = _study_file(folder, name)
        with locked(file.with_suffix(".lock"), file):
            study = open_study(settings, file, name, definition)
            try:
                self._run(study, settings, space)
            finally:
                self.launcher.conclusion = list(conclusion(study, cfg.metric, space))
            if (trial := _best_trial(study)) is not None:
                found = {"name": "optuna", "best_params": plain(trial.params), "best_value": trial.value}
                text = yaml.safe_dump(found, sort_keys=False)
                files.write_atomically(folder / "optimization_results.yaml", text)

    def _run(self, study: Study, settings: SearchConfig, space: SearchSpace) -> None:
        """Run trials until the study has `n_trials`, or too many fail."""
        self.launcher.fixed = space.fixed
        interrupted, failed = unfinished(study, space), to_repeat(study.get_trials())
        number = len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))
        if number:
            say(f"study {study.study_name}: {number} of {settings.n_trials} trials are done")
        while number < settings.n_trials:
            count = min(settings.n_jobs, settings.n_trials - number)
            batch, interrupted = interrupted[:count], interrupted[count:]
            batch += [ask(study, settings, space, failed) for _ in range(count - len(batch))]
            jobs = [[*space.fixed, *overrides(trial.params)] for trial in batch]
            results = self.launcher.launch(jobs, initial_job_idx=number)
            failures = sum(not tell(study, trial, done) for trial, done in zip(batch, results, strict=True))
            number += count
            if failures > settings.max_failure_rate * count:
                limit = f"hydra.sweeper.max_failure_rate={settings.max_failure_rate:g}"
                say(f"the search stops: {failures} of {count} trials failed, more than {limit} allows")
                return


class _PruningHook(Hook):
    """A hook that reports the evaluations of a trial to the study, and stops the run of a bad trial.

    The evaluation before training is not reported, because all trials have the same.

    Args:
        study: the study, with its pruner.
        trial: the trial of this run.
        metric: name of the metric that the search optimises.
    """

    def __init__(self, study: Study, trial: FrozenTrial, metric: str) -> None:
        self.study, self.metric = study, metric
        self.trial = Trial(study, trial._trial_id)
        self.reported = set(trial.intermediate_values)  # steps, of an earlier session too

    def after_evaluation(self, state: TrainState, metrics: Row, completions: list[dict[str, Any]]) -> None:
        """Report the value of the metric, if the evaluation has measured it.

        Raises:
            StopRun: the pruner stops the trial.
        """
        value = metrics.get(self.metric)
        if state.update == 0 or value is None or not math.isfinite(value):
            return
        step = round(_STEPS * state.update / state.num_updates)
        if step not in self.reported:
            self.trial.report(value, step)
            self.reported.add(step)
        if not state.done and self.trial.should_prune():
            for trial in _running(self.study):  # trials with equal values have one run
                if trial.params == self.trial.params:
                    Trial(self.study, trial._trial_id).set_user_attr(_PRUNED, state.update)
            say(
                f"pruned: {self.metric} {figure(value)} at update {state.update} of {state.num_updates}; the "
                "best value so far is worse than the median of the finished trials at this point"
            )
            raise StopRun(_PRUNED)


def pruning_hooks(settings: Any, folder: Path, task_overrides: Sequence[str], metric: str) -> Sequence[Hook]:
    """Return the hook of a job that is a trial of a search; an empty list if its trial is not running.

    Args:
        settings: the settings of the search (`SearchConfig`) in the process of the job.
        folder: the folder of the sweep.
        task_overrides: the overrides of the job.
        metric: name of the metric that the search optimises.
    """
    name = str(settings.study_name)
    pruner = MedianPruner(settings.warmup_trials, round(_STEPS * settings.warmup))
    study = load_study(
        study_name=name,
        storage=_storage(settings, _study_file(folder, name)),
        pruner=NopPruner() if settings.pruner is Pruner.none else pruner,
    )
    own = (each for each in _running(study) if set(overrides(each.params)) <= set(task_overrides))
    return [_PruningHook(study, trial, metric) for trial in own][:1]


def _study_file(folder: Path, name: str) -> Path:
    """Return the file of a study; `folder` is the folder of the sweep."""
    return folder / ".search" / f"{files.component(name, fill='_')}.log"


def _storage(settings: SearchConfig, file: Path) -> BaseStorage | str:
    """Return the storage of a study: the URL of a database, or a file whose default is `file`."""
    if settings.storage is not None and "://" in settings.storage:
        return settings.storage
    return JournalStorage(JournalFileBackend(settings.storage or str(file)))


def _running(study: Study) -> list[FrozenTrial]:
    return study.get_trials(states=(TrialState.RUNNING,))


def _best_trial(study: Study) -> FrozenTrial | None:
    """Return the best finished trial; None if no trial is finished."""
    try:
        return study.best_trial
    except ValueError:
        return None


def conclusion(study: Study, metric: str, space: SearchSpace) -> Iterator[str]:
    """Yield the lines at the end of a search: number of trials, the best values, and the command with them.

    The command leaves out `sweep=`, whose recipe may shorten runs.
    """
    trials = study.get_trials(deepcopy=False)
    states = Counter(trial.state for trial in trials)
    numbers = {
        "finished": states[TrialState.COMPLETE],
        "pruned": states[TrialState.PRUNED],
        "failed": len(to_repeat(trials)),
        "unfinished": states[TrialState.RUNNING],
    }
    counts = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    yield f"study {study.study_name}: {counts or 'no trials'}"
    if (best := _best_trial(study)) is None:
        return
    values = overrides(best.params)
    yield f"best: {metric} {figure(best.value or 0.0)} with {' '.join(values)}"
    fixed = [word for word in space.fixed if not word.startswith("sweep=")]
    command = shlex.join(["python", "-m", "rlhf.train", *config_dir_words(), *fixed, *values])
    yield f"train with these values: {command}"


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trial as they are used: numbers are rounded, and texts are read as YAML."""
    pairs = (override.split("=", 1) for override in overrides(params))
    return {
        key: type(params[key])(text) if isinstance(params[key], float) else yaml.safe_load(text)
        for key, text in pairs
    }


def open_study(settings: SearchConfig, file: Path, name: str, definition: dict[str, Any]) -> Study:
    """Return the study, which is created if it does not exist.

    Raises:
        UserError: the storage cannot be used, or the study belongs to another search.
    """
    try:
        study = create_study(
            study_name=name,
            storage=_storage(settings, file),
            direction=definition["direction"],
            load_if_exists=True,
        )
        if "definition" not in study.user_attrs:
            study.set_user_attr("definition", definition)
    except Exception as error:  # a driver of a database raises exceptions of its own
        raise UserError(
            "hydra.sweeper.storage must be a file or the URL of a database that Optuna can use "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}), got "
            f"{settings.storage or file}; set hydra.sweeper.storage=<another file>"
        ) from None
    other = [key for key, value in definition.items() if study.user_attrs["definition"].get(key) != value]
    if other:
        got = f"{name}, whose {' and '.join(other)} differ; set another hydra.sweeper.study_name"
        raise UserError(f"hydra.sweeper.study_name must be a study of the same search, got {got}")
    return study


def ask(study: Study, settings: SearchConfig, space: SearchSpace, failed: list[dict[str, Any]]) -> Trial:
    """Return a new trial. Its sampler has a seed of its own, so that an interruption changes no proposal.

    Args:
        study: the study.
        settings: the settings of the search.
        space: the search space.
        failed: the values of trials to repeat; the first is removed.
    """
    seed = derive(settings.seed, "trial", len(study.get_trials(deepcopy=False))) % 2**32
    random = settings.sampler is Sampler.random
    tpe = TPESampler(n_startup_trials=settings.warmup_trials, seed=seed)
    study.sampler = RandomSampler(seed) if random else tpe
    if failed:
        study.enqueue_trial(failed.pop(0))
    return study.ask(space.distributions)


def unfinished(study: Study, space: SearchSpace) -> list[Trial]:
    """Return the interrupted trials of an earlier session, and tell the study which trials are pruned."""
    interrupted: list[Trial] = []
    for trial in _running(study):
        if trial.params.keys() != space.distributions.keys():  # the command was killed while it asked
            study.tell(trial.number, state=TrialState.FAIL)
        elif _PRUNED in trial.user_attrs:
            study.tell(trial.number, state=TrialState.PRUNED)
        else:
            interrupted.append(Trial(study, trial._trial_id))
    return interrupted


def to_repeat(trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
    """Return the values of the failed trials that were not repeated."""
    failed = [each.params for each in trials if each.state is TrialState.FAIL and each.params]
    others = {frozenset(overrides(each.params)) for each in trials if each.state is not TrialState.FAIL}
    distinct = {frozenset(overrides(params)): params for params in failed}
    return [params for values, params in distinct.items() if values not in others]


def tell(study: Study, trial: Trial, done: JobReturn) -> bool:
    """Store the result of a trial, and return whether the trial has not failed.

    A trial fails if its job fails, or if its run is finished without a finite value of the metric.
    """
    value, state = done._return_value, TrialState.FAIL
    if done.status is JobStatus.COMPLETED:
        if _PRUNED in study.get_trials(deepcopy=False)[trial.number].user_attrs:
            state = TrialState.PRUNED
        elif value is not None and math.isfinite(value):
            state = TrialState.COMPLETE
    study.tell(trial.number, value if state is TrialState.COMPLETE else None, state=state)
    return state is not TrialState.FAIL
