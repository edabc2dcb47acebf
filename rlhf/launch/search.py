"""Hyperparameter searches with Optuna, and the jobs of a sweep in their processes."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from rlhf.checks.check import as_objects, overrides_of
from rlhf.config.run import SEARCH_SWEEPER, Direction, Pruner, Sampler, SearchConfig
from rlhf.core import files
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.files import component, write_atomically
from rlhf.core.formatting import figure
from rlhf.core.launched import derive, is_first_rank, world_size
from rlhf.experiment import Experiment
from rlhf.launch import command_line
from rlhf.launch import sweep as sweeps
from rlhf.launch.command_line import register_sweeper
from rlhf.launch.preflight import SearchSpace, announce, is_search, overrides, search_space, settings_of
from rlhf.loggers.hooks import Hook, StopRun
from rlhf.processes import signals
from rlhf.runs.lock import locked, waiting_claim
from rlhf.terminal import progress
from rlhf.terminal.console import console, say
from rlhf.words.catalogue import config_dir_words
from rlhf.words.identity import digest

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from rlhf.config.root import Config
    from rlhf.core.metrics import Row
    from rlhf.core.state import TrainState


# Hyperparameter searches with Optuna: `python -m rlhf.train -m hydra/sweeper=search`.
#
#     SearchSweeper (process of the command)       PruningHook (process of the job)
#     ask the study for the values of a trial
#     launch the job                          -->  report each evaluation to the study
#                                                  stop the run if the pruner of the study says so
#     tell the study the result               <--  the objective metric
#
# The study is a file below `output_dir`, or a database. The same command continues the study: a trial that
# was interrupted or failed runs again, with its values. This module imports no torch, and Optuna only in
# functions.


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


# The Optuna study of a search: storage, sampler and pruner, new trials, and the results of trials.
#
# This module imports no torch, and Optuna only in functions.


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


# A job of a sweep, in the process that runs it: that of the sweep, one of joblib, or one of submitit.
#
# A process of joblib runs several jobs. After a signal, a running job writes its checkpoint, and a job that
# has not begun is refused. If the process of the sweep is killed, a process of joblib does the same and ends.


_POLL_S = 0.5  # seconds between checks whether the process of the sweep has ended

_handlers = ExitStack()  # in a process of joblib: its signal handlers, from its first job until its end
_busy = threading.Lock()  # locked while a job runs in a process of joblib


def run_job(config: DictConfig, folder: Path) -> float | None:
    """Run a job, and return the value of the metric that a sweeper optimises.

    Args:
        config: the config of the job.
        folder: the run folder.

    Raises:
        UserError, RunError: the job failed, or a signal stopped the process of the job.
        Interrupted: a signal stopped the process of the sweep, which runs the job.
    """
    of_joblib = sweeps.current is None and "joblib" in HydraConfig.get().launcher._target_
    try:
        with _process_of_joblib() if of_joblib else nullcontext():
            return _execute(config, folder)
    except Interrupted as reason:
        if sweeps.current is not None:
            raise
        if not of_joblib:
            command_line.requeue(reason)
        raise RunError(str(reason)) from None
    except (UserError, RunError):
        raise
    except Exception:
        traceback.print_exc()  # the exception may arrive in the process of the sweep without its traceback
        raise


def _execute(config: DictConfig, folder: Path) -> float | None:
    job = HydraConfig.get()
    overrides = overrides_of(job.overrides)
    experiment = Experiment.composed(config, overrides, folder)
    experiment.validate()  # perhaps on another machine than that of the sweep
    begin_job(job.job.num, overrides)
    metric = experiment.config.metric
    if (finished := experiment.prepare(wait=world_size() == 1)) is not None:
        announce(experiment.files, finished, metric)
        return finished["result"].get(metric)
    experiment.hooks = pruning_hooks(job.sweeper, Path(job.sweep.dir), overrides, metric)
    return experiment.execute(claim=waiting_claim)


def begin_job(number: int, overrides: list[str]) -> None:
    """Print the title of a job. In a process for jobs, later titles begin with the number of the job.

    Args:
        number: number of the job among the jobs that run, from 0.
        overrides: overrides of the job.
    """
    known = None if sweeps.current is None else sweeps.current.title(overrides)
    console.print(known or f"job {number + 1}: {' '.join(overrides)}", markup=False, style="bold")
    progress.job = f"job {number + 1} " if sweeps.current is None else ""


@contextmanager
def _process_of_joblib() -> Iterator[None]:
    """Run a job in a process of joblib, which keeps its signal handlers between jobs.

    Raises:
        Interrupted: a signal was received, also before this job.
    """
    if signals.active is None:
        _handlers.enter_context(signals.interruptible())
        threading.Thread(target=_end_with_sweep, args=(os.getppid(),), daemon=True).start()
    assert signals.active is not None, "joblib runs jobs in the main thread"
    signals.active.check()
    with _busy:
        try:
            yield
        finally:
            signals.active.deferred = True


def _end_with_sweep(sweep: int) -> None:
    """Wait until the process `sweep`, the parent, has ended; let a running job stop; end this process."""
    while os.getppid() == sweep:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    with _busy:
        os._exit(os.EX_TEMPFAIL)
