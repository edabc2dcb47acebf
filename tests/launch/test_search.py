"""Tests of studies without runs: continuing a study, repeating failed trials, and the choice to prune."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn
from optuna import load_study
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from rlhf import StopRun
from rlhf.config.run import Pruner, Sampler, SearchConfig
from rlhf.core.errors import RunError, UserError
from rlhf.launch.preflight import SearchSpace, completed, failed
from rlhf.launch.search import (
    PruningHook,
    ask,
    conclusion,
    open_study,
    plain,
    pruner,
    storage_of,
    tell,
    to_repeat,
    unfinished,
)
from rlhf.loggers.logger import Hook, Hooks

SPACE = SearchSpace(
    ["sweep=lr", "algo=dpo"],
    {
        "optim.lr": FloatDistribution(1e-5, 1e-2, log=True),
        "algo.beta": CategoricalDistribution(["0.1", "a b"]),
    },
)
DEFINITION = {"runs": "12345678", "objective_metric": "eval/win_rate", "direction": "maximize"}
SETTINGS = SearchConfig(warmup_trials=2)


def opened(tmp_path, **changed):
    return open_study(SETTINGS, tmp_path / "study.log", "study", {**DEFINITION, **changed})


def result(trial) -> JobReturn:
    """Return the result of a job whose win rate is best at a learning rate of 1e-3."""
    return completed(1 - abs(math.log10(trial.params["optim.lr"]) + 3))


@pytest.mark.parametrize("sampler", Sampler)
def test_an_interrupted_search_proposes_what_an_uninterrupted_search_proposes(tmp_path, sampler):
    settings = SearchConfig(warmup_trials=2, sampler=sampler)
    whole, found = opened(tmp_path), []
    for _ in range(6):
        trial = ask(whole, settings, SPACE, [])
        tell(whole, trial, result(trial))
    for _ in range(6):
        study = open_study(settings, tmp_path / "other.log", "study", DEFINITION)
        ask(study, settings, SPACE, [])  # the command is killed
        study = open_study(settings, tmp_path / "other.log", "study", DEFINITION)
        (trial,) = unfinished(study, SPACE)
        tell(study, trial, result(trial))
        found.append(trial.params)
    assert found == [trial.params for trial in whole.trials]
    assert len({values["optim.lr"] for values in found}) == 6
    assert study.best_trial.params == whole.best_trial.params


def test_a_failed_trial_is_repeated_once_by_the_next_command(tmp_path):
    study = opened(tmp_path)
    first, second, third = (ask(study, SETTINGS, SPACE, []) for _ in range(3))
    assert not tell(study, first, failed(RunError("stopped")))
    assert not tell(study, second, completed(None)) and not tell(study, third, completed(math.nan))
    again = to_repeat(opened(tmp_path).trials)
    assert again == [first.params, second.params, third.params]
    trial = ask(study, SETTINGS, SPACE, again)
    assert trial.params == first.params and len(again) == 2
    assert to_repeat(study.trials) == again, "a trial that runs again is not listed"
    assert tell(study, trial, completed(0.5))
    assert to_repeat(study.trials) == again


def test_a_study_of_another_search_is_refused(tmp_path):
    opened(tmp_path)
    with pytest.raises(
        UserError, match=r"whose objective_metric differ; set another hydra\.sweeper\.study_name"
    ):
        opened(tmp_path, objective_metric="eval/score")


def test_a_storage_that_is_no_study_is_refused(tmp_path):
    (tmp_path / "study.log").write_text("no study\n{}\n")
    with pytest.raises(UserError, match=r"hydra\.sweeper\.storage must be a file or the URL"):
        opened(tmp_path)
    with pytest.raises(UserError, match="nodatabase"):
        open_study(SearchConfig(storage="nodatabase://x"), tmp_path / "study.log", "study", DEFINITION)


# -- pruning ---------------------------------------------------------------------------------------


def state(update: int, num_updates: int = 10):
    return SimpleNamespace(update=update, num_updates=num_updates, done=update == num_updates)


def hook(tmp_path, trial, settings=SETTINGS) -> PruningHook:
    """Return the hook of a trial as another process makes it."""
    storage = storage_of(settings, tmp_path / "study.log")
    study = load_study(study_name="study", storage=storage, pruner=pruner(settings))
    return PruningHook(study, study.trials[trial.number], "eval/win_rate")


def report(made: PruningHook, updates: dict[int, float], num_updates: int = 10) -> None:
    for update, value in updates.items():
        made.after_evaluation(state(update, num_updates), {"eval/win_rate": value}, [])


@pytest.fixture
def study(tmp_path):
    """Return a study of two finished trials: win rates 0.5 and 0.7 at update 5, 0.7 and 0.9 at the end."""
    made = opened(tmp_path)
    for value in (0.5, 0.7):
        trial = ask(made, SETTINGS, SPACE, [])
        report(hook(tmp_path, trial), {5: value, 10: value + 0.2})
        assert tell(made, trial, completed(value))
    return made


def test_a_trial_worse_than_the_median_is_pruned_and_is_no_failure(study, tmp_path):
    trial = ask(study, SETTINGS, SPACE, [])
    with pytest.raises(StopRun, match="pruned"):
        report(hook(tmp_path, trial), {5: 0.59})
    assert unfinished(opened(tmp_path), SPACE) == [], "also if the command ends before it has the result"
    assert study.trials[2].state is TrialState.PRUNED
    trial = ask(study, SETTINGS, SPACE, [])
    with pytest.raises(StopRun):
        report(hook(tmp_path, trial), {10: 0.59}, num_updates=20)
    assert tell(study, trial, completed(0.59)) and study.trials[3].state is TrialState.PRUNED


def test_trials_are_compared_at_the_same_part_of_their_updates(study, tmp_path):
    trial = ask(study, SETTINGS, SPACE, [])
    report(hook(tmp_path, trial), {10: 0.61}, num_updates=20)  # above 0.6, the median at update 5 of 10
    assert study.trials[2].intermediate_values == {500: 0.61}


def test_trials_with_the_same_values_share_a_run_and_are_pruned_together(study, tmp_path):
    trial = ask(study, SETTINGS, SPACE, [])
    twin = ask(study, SETTINGS, SPACE, [trial.params])
    other = ask(study, SETTINGS, SPACE, [])
    with pytest.raises(StopRun):
        report(hook(tmp_path, trial), {5: 0.1})
    for each in (trial, twin, other):
        assert tell(study, each, completed(0.1))
    assert [each.state.name for each in study.trials[2:]] == ["PRUNED", "PRUNED", "COMPLETE"]


@pytest.mark.parametrize(
    ("updates", "settings"),
    [
        ({5: 0.61}, SETTINGS),
        ({0: 0.1}, SETTINGS),  # before training
        ({10: 0.1}, SETTINGS),  # the run is finished
        ({5: math.nan}, SETTINGS),
        ({5: 0.1}, SearchConfig(warmup_trials=3)),
        ({5: 0.1}, SearchConfig(warmup_trials=2, warmup=0.6)),
        ({5: 0.1}, SearchConfig(pruner=Pruner.none)),
    ],
)
def test_a_trial_is_not_pruned(study, tmp_path, updates, settings):
    trial = ask(study, settings, SPACE, [])
    report(hook(tmp_path, trial, settings), updates)
    value = updates.get(5, updates.get(10, math.nan))
    reported = study.trials[2].intermediate_values
    assert list(reported.values()) == ([] if math.isnan(value) else [value])


def test_a_resumed_trial_does_not_report_an_evaluation_twice(study, tmp_path, recwarn):
    trial = ask(study, SETTINGS, SPACE, [])
    for _ in range(2):
        report(hook(tmp_path, trial), {5: 0.9})
    assert study.trials[2].intermediate_values == {500: 0.9} and not recwarn.list


def test_an_exception_stop_run_of_a_hook_stops_the_run_without_a_failure():
    class Stopping(Hook):
        calls = 0

        def after_update(self, state, metrics):
            self.calls += 1
            raise StopRun("enough")

    asked = []
    stopping = Stopping()
    hooks = Hooks([stopping], lambda: asked.append(True))
    hooks.updated({}, state(1))
    hooks.updated({}, state(2))
    assert (hooks.stopped, hooks.failure, asked, stopping.calls) == ("enough", None, [True], 1)


# -- results ---------------------------------------------------------------------------------------


def test_the_conclusion_has_the_command_of_the_best_values_without_the_recipe_of_the_search(study):
    values = study.best_trial.params
    lr = f"{values['optim.lr']:.6g}"
    counts, best, command = conclusion(study, "eval/win_rate", SPACE)
    assert counts == "study study: 2 finished"
    assert best == f"best: eval/win_rate 0.700 with optim.lr={lr} algo.beta={values['algo.beta']}"
    assert command.startswith(f"train with these values: python -m rlhf.train algo=dpo optim.lr={lr} ")
    assert plain({"optim.lr": 0.000123456789, "algo.beta": "0.05", "n": 3}) == {
        "optim.lr": 0.000123457,
        "algo.beta": 0.05,
        "n": 3,
    }


def test_a_study_without_a_finished_trial_has_no_best_values(tmp_path):
    assert list(conclusion(opened(tmp_path), "eval/win_rate", SPACE)) == ["study study: no trials"]
