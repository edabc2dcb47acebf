"""Searches without runs: the space, continuing a study, repeating failed trials, and the choice to prune."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from rlhf import StopRun
from rlhf.config.run import Pruner, Sampler, SearchConfig
from rlhf.core.errors import RunError, UserError
from rlhf.launch.preflight import completed, failed
from rlhf.launch.search import (
    SearchSpace,
    ask,
    conclusion,
    distribution,
    open_study,
    overrides,
    plain,
    pruning_hooks,
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
SETTINGS = SearchConfig(warmup_trials=2, study_name="study")


@pytest.mark.parametrize(
    ("word", "wanted", "in_the_middle"),
    [
        ("optim.lr=interval(0.2,0.4)", FloatDistribution(0.2, 0.4), "0.3"),
        ("optim.lr=tag(log,interval(1e-5,1e-3))", FloatDistribution(1e-5, 1e-3, log=True), "0.0001"),
        ("schedule.epochs=int(interval(1,5))", IntDistribution(1, 5), "3"),
        ("schedule.epochs=tag(log,int(interval(1,100)))", IntDistribution(1, 100, log=True), "10"),
        ("schedule.epochs=range(1,4)", IntDistribution(1, 3), "2"),
        ("schedule.epochs=range(8,0,step=-4)", IntDistribution(4, 8, step=4), "4"),
        ("algo.beta=range(0.1,0.35,step=0.1)", FloatDistribution(0.1, 0.3, step=0.1), "0.2"),
        ("algo.beta=choice(0.05,0.1)", CategoricalDistribution(["0.05", "0.1"]), "0.05"),
        ("algo=dpo,rloo", CategoricalDistribution(["dpo", "rloo"]), "dpo"),
        ("optim.betas=[0.9,0.9],[0.9,1]", CategoricalDistribution(["[0.9,0.9]", "[0.9,1]"]), "[0.9,0.9]"),
    ],
)
def test_a_swept_override_is_a_distribution_with_a_middle(word, wanted, in_the_middle):
    (override,) = OverridesParser.create().parse_overrides([word])
    assert distribution(override) == wanted
    assert SearchSpace(["seed=1"], {"x": wanted}).example == ["seed=1", f"x={in_the_middle}"]


@pytest.mark.parametrize(
    "word",
    ["optim.lr=interval(2,1)", "optim.lr=tag(log,interval(0,1.0))", "seed=range(3,3)", "seed=range(1,2,0)"],
)
def test_invalid_bounds_are_refused_with_the_key_and_the_value(word):
    (override,) = OverridesParser.create().parse_overrides([word])
    with pytest.raises(UserError, match=f"{word.partition('=')[0]} must .*; correct the bounds") as refused:
        distribution(override)
    assert f"got {word}" in str(refused.value)


def test_numbers_of_a_trial_are_rounded_to_six_digits_and_texts_are_kept():
    values = {"optim.lr": 0.000123456789, "schedule.epochs": 12345678, "algo.beta": "0.05"}
    assert overrides(values) == ["optim.lr=0.000123457", "schedule.epochs=12345678", "algo.beta=0.05"]
    assert plain(values) == {"optim.lr": 0.000123457, "schedule.epochs": 12345678, "algo.beta": 0.05}


def opened(folder, settings=SETTINGS, **changed):
    (folder / ".search").mkdir(parents=True, exist_ok=True)
    return open_study(settings, folder / ".search/study.log", "study", {**DEFINITION, **changed})


def result(trial):
    """Return the result of a job whose win rate is best at a learning rate of 1e-3."""
    return completed(1 - abs(math.log10(trial.params["optim.lr"]) + 3))


@pytest.mark.parametrize("sampler", Sampler)
def test_an_interrupted_search_proposes_what_an_uninterrupted_search_proposes(tmp_path, sampler):
    settings = replace(SETTINGS, sampler=sampler)
    whole, found = opened(tmp_path, settings), []
    for _ in range(6):
        trial = ask(whole, settings, SPACE, [])
        tell(whole, trial, result(trial))
    for _ in range(6):
        ask(opened(tmp_path / "other", settings), settings, SPACE, [])  # the command is killed
        study = opened(tmp_path / "other", settings)
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


def test_a_storage_that_is_no_study_is_refused(tmp_path):
    with pytest.raises(UserError, match="nodatabase"):
        opened(tmp_path, SearchConfig(storage="nodatabase://x"))
    (tmp_path / ".search/study.log").write_text("no study\n{}\n")
    with pytest.raises(UserError, match=r"hydra\.sweeper\.storage must be a file or the URL"):
        opened(tmp_path)


def state(update: int, num_updates: int = 10):
    return SimpleNamespace(update=update, num_updates=num_updates, done=update == num_updates)


def hook(folder, trial, settings=SETTINGS):
    """Return the hook of a trial as the process of its job makes it."""
    (made,) = pruning_hooks(settings, folder, ["seed=1", *overrides(trial.params)], "eval/win_rate")
    return made


def report(made, updates, num_updates=10):
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
        ({5: 0.1}, replace(SETTINGS, warmup_trials=3)),
        ({5: 0.1}, replace(SETTINGS, warmup=0.6)),
        ({5: 0.1}, replace(SETTINGS, pruner=Pruner.none)),
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


def test_the_conclusion_has_the_command_of_the_best_values_without_the_recipe_of_the_search(study, tmp_path):
    assert list(conclusion(opened(tmp_path / "new"), "eval/win_rate", SPACE)) == ["study study: no trials"]
    values = study.best_trial.params
    lr = f"{values['optim.lr']:.6g}"
    counts, best, command = conclusion(study, "eval/win_rate", SPACE)
    assert counts == "study study: 2 finished"
    assert best == f"best: eval/win_rate 0.700 with optim.lr={lr} algo.beta={values['algo.beta']}"
    assert command.startswith(f"train with these values: python -m rlhf.train algo=dpo optim.lr={lr} ")
