"""Hyperparameter searches with Optuna: `python -m rlhf.train -m hydra/sweeper=search`.

    SearchSweeper (process of the command)       PruningHook (process of the job)
    ask the study for the values of a trial
    launch the job                          -->  report each evaluation to the study
                                                 stop the run if the pruner of the study says so
    tell the study the result               <--  the objective metric

The study is a file below `output_dir`, or a database. The same command continues the study: a trial that was
interrupted or failed runs again, with its values. This module imports no torch, and Optuna only in functions.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from rlhf.checks.check import as_objects
from rlhf.config.catalogue import config_dir_words
from rlhf.config.search import SEARCH_SWEEPER, SearchConfig
from rlhf.core.console import say
from rlhf.core.files import write_atomically
from rlhf.core.formatting import figure
from rlhf.core.launched import is_first_rank
from rlhf.launch import sweep as sweeps
from rlhf.launch.hydra_internals import register_sweeper
from rlhf.launch.search_space import SearchSpace, is_search, overrides, search_space, settings_of
from rlhf.launch.study import (
    PRUNED,
    STEPS,
    ask,
    default_name,
    define,
    open_study,
    pruner,
    resumed,
    running,
    storage_of,
    study_file,
    tell,
    to_repeat,
    unfinished,
)
from rlhf.loggers.hooks import Hook, StopRun
from rlhf.runs.lock import locked

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from rlhf.core.metrics import Row
    from rlhf.core.state import TrainState

_RESULTS = "optimization_results.yaml"


class SearchSweeper(Sweeper):
    """A sweeper whose jobs are the trials of an Optuna study.

    Args:
        settings: the fields of `SearchConfig`.
    """

    config: DictConfig
    hydra_context: HydraContext
    launcher: Launcher

    def __init__(self, **settings: Any) -> None:
        """Accept the settings, which `sweep` reads from the config."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the config of the sweep, and make its launcher."""
        self.config = config
        self.hydra_context = hydra_context
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
        from optuna import logging

        logging.set_verbosity(logging.WARNING)
        settings = settings_of(self.config.hydra.sweeper)
        space = search_space(self.config)
        loader = self.hydra_context.config_loader
        example = loader.load_sweep_config(self.config, space.example)
        cfg = as_objects(example, space.example)
        definition = define(cfg, settings, space)
        name = settings.study_name or default_name(cfg, definition)
        if settings.study_name is None:  # each job is composed again, from the overrides
            with read_write(self.config), open_dict(self.config):
                self.config.hydra.overrides.hydra.append(f"hydra.sweeper.study_name={name}")
        folder = Path(self.config.hydra.sweep.dir)
        file = study_file(folder, name)
        with locked(file.with_suffix(".lock"), file):
            study = open_study(settings, file, name, definition)
            try:
                self.run(study, settings, space)
            finally:
                if sweeps.current is not None:
                    sweeps.current.conclusion = list(conclusion(study, cfg.metric, space))
            _write_results(study, folder)

    def run(self, study: Study, settings: SearchConfig, space: SearchSpace) -> None:
        """Run trials until the study has `n_trials`, or too many fail."""
        from optuna.trial import TrialState

        if sweeps.current is not None:
            sweeps.current.fixed = space.fixed
        interrupted = unfinished(study, space)
        failed = to_repeat(study.get_trials())
        number = len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))
        if number:
            say(f"study {study.study_name}: {number} of {settings.n_trials} trials are done")
        while number < settings.n_trials:
            count = min(settings.n_jobs, settings.n_trials - number)
            batch = [
                interrupted.pop(0) if interrupted else ask(study, settings, space, failed)
                for _ in range(count)
            ]
            jobs = [[*space.fixed, *overrides(trial.params)] for trial in batch]
            results = self.launcher.launch(jobs, initial_job_idx=number)
            failures = [not tell(study, trial, done) for trial, done in zip(batch, results, strict=True)]
            number += count
            if sum(failures) > settings.max_failure_rate * count:
                say(
                    f"the search stops: {sum(failures)} of {count} trials failed, more than "
                    f"hydra.sweeper.max_failure_rate={settings.max_failure_rate:g} allows"
                )
                return


class PruningHook(Hook):
    """A hook that reports the evaluations of a trial to the study, and stops the run of a bad trial.

    The evaluation before training is not reported, because all trials have the same.

    Args:
        study: the study, with its pruner.
        trial: the trial of this run.
        metric: name of the metric that the search optimises.
    """

    def __init__(self, study: Study, trial: FrozenTrial, metric: str) -> None:
        self.study = study
        self.trial = resumed(study, trial)
        self.reported = set(trial.intermediate_values)  # steps, of an earlier session too
        self.metric = metric

    def after_evaluation(self, state: TrainState, metrics: Row, completions: list[dict[str, Any]]) -> None:
        """Report the value of the metric, if the evaluation has measured it.

        Raises:
            StopRun: the pruner stops the trial.
        """
        value = metrics.get(self.metric)
        if state.update == 0 or value is None or not math.isfinite(value):
            return
        step = round(STEPS * state.update / state.num_updates)
        if step not in self.reported:
            self.trial.report(value, step)
            self.reported.add(step)
        if not state.done and self.trial.should_prune():
            for trial in running(self.study):  # trials with equal values have one run
                if trial.params == self.trial.params:
                    resumed(self.study, trial).set_user_attr(PRUNED, state.update)
            say(
                f"pruned: {self.metric} {figure(value)} at update {state.update} of {state.num_updates}; the "
                "best value so far is worse than the median of the finished trials at this point"
            )
            raise StopRun(PRUNED)


def pruning_hooks(
    sweeper: DictConfig, folder: Path, task_overrides: Sequence[str], metric: str
) -> Sequence[Hook]:
    """Return the hook of a job that is a trial of a search; an empty list for other jobs.

    Args:
        sweeper: `hydra.sweeper` in the process of the job.
        folder: the folder of the sweep.
        task_overrides: the overrides of the job.
        metric: name of the metric that the search optimises.
    """
    if not is_search(sweeper) or not is_first_rank():
        return []
    from optuna import load_study, logging

    logging.set_verbosity(logging.WARNING)
    settings = settings_of(sweeper)
    name = str(settings.study_name)
    storage = storage_of(settings, study_file(folder, name))
    study = load_study(study_name=name, storage=storage, pruner=pruner(settings))
    own = (each for each in running(study) if set(overrides(each.params)) <= set(task_overrides))
    return [PruningHook(study, trial, metric) for trial in own][:1]


def register() -> None:
    """Let Hydra find the sweeper of `hydra/sweeper=search`."""
    register_sweeper(SEARCH_SWEEPER, SearchSweeper)


def best_trial(study: Study) -> FrozenTrial | None:
    """Return the best finished trial; None if no trial is finished."""
    try:
        return study.best_trial
    except ValueError:
        return None


def conclusion(study: Study, metric: str, space: SearchSpace) -> Iterator[str]:
    """Yield the lines at the end of a search: number of trials, the best values, and the command with them.

    The command leaves out `sweep=`, whose recipe may shorten runs.
    """
    from optuna.trial import TrialState

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
    if (best := best_trial(study)) is None:
        return
    values = overrides(best.params)
    yield f"best: {metric} {figure(best.value or 0.0)} with {' '.join(values)}"
    fixed = [word for word in space.fixed if not word.startswith("sweep=")]
    command = shlex.join(["python", "-m", "rlhf.train", *config_dir_words(), *fixed, *values])
    yield f"train with these values: {command}"


def _write_results(study: Study, folder: Path) -> None:
    """Write the values and the result of the best trial, if a trial is finished."""
    if (best := best_trial(study)) is not None:
        found = {"name": "optuna", "best_params": plain(best.params), "best_value": best.value}
        write_atomically(folder / _RESULTS, yaml.safe_dump(found, sort_keys=False))


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trial as they are used: numbers are rounded, and texts are read as YAML."""
    pairs = (override.split("=", 1) for override in overrides(params))
    return {
        key: type(params[key])(text) if isinstance(params[key], float) else yaml.safe_load(text)
        for key, text in pairs
    }
