"""The Optuna study of a search: storage, sampler and pruner, new trials, and the results of trials.

This module imports no torch, and Optuna only in functions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus

from rlhf.config.identity import digest
from rlhf.config.search import Direction, Pruner, Sampler, SearchConfig
from rlhf.core import files
from rlhf.core.errors import UserError
from rlhf.core.files import component
from rlhf.core.seeding import derive
from rlhf.launch.search_space import SearchSpace, overrides

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from rlhf.config.root import Config

FOLDER = ".search"  # below the folder of the sweep: the files of studies
PRUNED = "pruned"  # attribute of a pruned trial
STEPS = 1000  # steps of a trial: all updates of its run; the runs of a search may differ in their updates


def define(cfg: Config, settings: SearchConfig, space: SearchSpace) -> dict[str, Any]:
    """Return what identifies a search: settings of the runs, metric, direction and search space.

    Args:
        cfg: the config of a trial in the middle of the space.
        settings: the settings of the search.
        space: the search space.
    """
    from optuna.distributions import distribution_to_json

    best = Direction.minimize if cfg.minimised else Direction.maximize
    return {
        "runs": digest(cfg),
        "objective_metric": cfg.metric,
        "direction": (settings.direction or best).value,
        "space": {key: json.loads(distribution_to_json(each)) for key, each in space.distributions.items()},
    }


def default_name(cfg: Config, definition: dict[str, Any]) -> str:
    """Return the name of a study for which the config sets no name."""
    return f"{cfg.task.name}-{cfg.algo.name}-{files.digest(definition)}"


def study_file(folder: Path, name: str) -> Path:
    """Return the file of a study; `folder` is the folder of the sweep."""
    return folder / FOLDER / f"{component(name, fill='_')}.log"


def storage_of(settings: SearchConfig, file: Path) -> BaseStorage | str:
    """Return the storage of a study: the URL of a database, or a file whose default is `file`."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if settings.storage is not None and "://" in settings.storage:
        return settings.storage
    return JournalStorage(JournalFileBackend(settings.storage or str(file)))


def open_study(settings: SearchConfig, file: Path, name: str, definition: dict[str, Any]) -> Study:
    """Return the study, which is created if it does not exist.

    Raises:
        UserError: the storage cannot be used, or the study belongs to another search.
    """
    from optuna import create_study

    try:
        study = create_study(
            study_name=name,
            storage=storage_of(settings, file),
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
        raise UserError(
            f"hydra.sweeper.study_name must be a study of the same search, got {name}, whose "
            f"{' and '.join(other)} differ; set another hydra.sweeper.study_name"
        )
    return study


def pruner(settings: SearchConfig) -> BasePruner:
    """Return the pruner of a search."""
    from optuna.pruners import MedianPruner, NopPruner

    if settings.pruner is Pruner.none:
        return NopPruner()
    return MedianPruner(settings.warmup_trials, round(STEPS * settings.warmup))


def sampler(settings: SearchConfig, number: int) -> BaseSampler:
    """Return the sampler of a trial, with a seed of its own, so that an interruption changes no proposal.

    Args:
        settings: the settings of the search.
        number: number of earlier trials.
    """
    from optuna.samplers import RandomSampler, TPESampler

    seed = derive(settings.seed, "trial", number) % 2**32
    if settings.sampler is Sampler.random:
        return RandomSampler(seed)
    return TPESampler(n_startup_trials=settings.warmup_trials, seed=seed)


# -- trials ----------------------------------------------------------------------------------------


def ask(study: Study, settings: SearchConfig, space: SearchSpace, failed: list[dict[str, Any]]) -> Trial:
    """Return a new trial.

    Args:
        study: the study.
        settings: the settings of the search.
        space: the search space.
        failed: the values of trials to repeat; the first is removed.
    """
    study.sampler = sampler(settings, len(study.get_trials(deepcopy=False)))
    if failed:
        study.enqueue_trial(failed.pop(0))
    return study.ask(space.distributions)


def resumed(study: Study, trial: FrozenTrial) -> Trial:
    """Return a trial of the storage as an object that can report values."""
    from optuna import Trial

    return Trial(study, trial._trial_id)


def running(study: Study) -> list[FrozenTrial]:
    """Return the trials that are not finished."""
    from optuna.trial import TrialState

    return study.get_trials(states=(TrialState.RUNNING,))


def unfinished(study: Study, space: SearchSpace) -> list[Trial]:
    """Return the interrupted trials of an earlier session, and tell the study which trials are pruned."""
    from optuna.trial import TrialState

    interrupted: list[Trial] = []
    for trial in running(study):
        if trial.params.keys() != space.distributions.keys():  # the command was killed while it asked
            study.tell(trial.number, state=TrialState.FAIL)
        elif PRUNED in trial.user_attrs:
            study.tell(trial.number, state=TrialState.PRUNED)
        else:
            interrupted.append(resumed(study, trial))
    return interrupted


def to_repeat(trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
    """Return the values of the failed trials that were not repeated."""
    from optuna.trial import TrialState

    failed, others = {}, set()
    for trial in trials:
        values = frozenset(overrides(trial.params))
        if trial.state is TrialState.FAIL and trial.params:
            failed[values] = trial.params
        elif trial.state is not TrialState.FAIL:
            others.add(values)
    return [params for values, params in failed.items() if values not in others]


def tell(study: Study, trial: Trial, done: JobReturn) -> bool:
    """Store the result of a trial, and return whether the trial has not failed.

    A trial fails if its job fails, or if its run is finished without a finite value of the metric.
    """
    from optuna.trial import TrialState

    value = done._return_value if done.status is JobStatus.COMPLETED else None
    pruned = PRUNED in study.get_trials(deepcopy=False)[trial.number].user_attrs
    if done.status is JobStatus.COMPLETED and pruned:
        study.tell(trial.number, state=TrialState.PRUNED)
        return True
    if value is None or not math.isfinite(value):
        study.tell(trial.number, state=TrialState.FAIL)
        return False
    study.tell(trial.number, float(value), state=TrialState.COMPLETE)
    return True
