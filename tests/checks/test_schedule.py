"""Tests of the rules for batches of several ranks, for divisible sizes and for the objective metric."""

from __future__ import annotations

import pytest

from rlhf.checks import check
from rlhf.words.compose import compose
from rlhf.words.identity import run_name, what_counts


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("schedule.minibatches=64", "schedule.prompts_per_update must give each of the 4 ranks a prompt ("),
        ("schedule.minibatches=64", "got 1; start fewer ranks, or set schedule.prompts_per_update=256"),
        ("eval.prompts=3", "eval.prompts must give each of the 4 ranks a prompt (the held-out prompts"),
        ("eval.prompts=3", "got 3; start fewer ranks, or set eval.prompts=4"),
    ],
)
def test_batch_with_fewer_prompts_than_ranks_is_reported(monkeypatch, overrides, said):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (problem,) = check.problems(compose([overrides]))
    assert said in problem
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert check.problems(compose([overrides])) == []


def test_training_metric_can_be_the_objective_without_evaluations():
    assert check.problems(compose(["objective_metric=objective/scores", "schedule.eval_every=0"])) == []


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("objective_metric=eval/gold_scor", "eval/gold_score"),
        ("objective_metric=gold_score", "eval/gold_score"),
        ("objective_metric=objective/scors", "objective/scores"),
        ("objective_metric=nonsense", "null"),
        ("objective_metric=environment/turns", "null"),
        ("objective_metric=eval/win_rat scorer@gold=none", "null"),
        ("objective_metric=eval/score algo=reward", "null"),
    ],
)
def test_an_objective_metric_that_the_run_lacks_is_refused_with_a_remedy_that_works(words, fix):
    (problem,) = check.problems(compose(words.split()))
    assert problem.endswith(f"; set objective_metric={fix}")
    assert check.problems(compose([*words.split(), f"objective_metric={fix}"])) == []


@pytest.mark.parametrize(
    ("words", "because"),
    [
        ("algo=dpo generator=dataset", "generator=dataset (nothing is sampled)"),
        ("algo=ppo algo.samples_per_prompt=2", "algo=ppo (prompts whose scores tie have signal, too)"),
        ("algo=oapl", "algo=oapl (prompts whose scores tie have signal, too)"),
        ("algo=bok generator=hf", "several ranks that all sample (a few prompts cannot be divided"),
    ],
)
def test_refill_needs_groups_that_have_no_signal(monkeypatch, words, because):
    if "ranks" in because:
        monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = check.problems(compose([*words.split(), "schedule.refill=2"]))
    assert problem.startswith(f"schedule.refill must be 0 with {because}") and "got 2; set" in problem
    assert check.problems(compose(words.split())) == []
    assert run_name(compose(["algo=grpo"])) == run_name(compose(["algo=grpo", "schedule.refill=0"]))


@pytest.mark.parametrize("words", ["algo=sft", "algo=dpo generator=dataset"])
def test_replay_needs_a_generator_that_samples(words):
    (problem,) = check.problems(compose([*words.split(), "schedule.replay=2"]))
    assert problem == (
        "schedule.replay must be 1 with generator=dataset (nothing is sampled, and epochs repeat stored "
        "responses), got 2; set schedule.replay=1"
    )
    assert check.problems(compose(words.split())) == []


def test_a_replay_buffer_that_is_larger_than_the_run_gives_a_warning():
    length = "schedule.total_episodes=256"  # two updates
    for replay, expected in (
        (2, []),
        (3, ["schedule.replay=3 batches are never reached in a run of 2 updates"]),
    ):
        cfg = compose([length, f"schedule.replay={replay}"])
        assert [text for text in check.warnings(cfg) if "replay" in text] == expected


def test_solved_prompts_need_scores_of_samples():
    (problem,) = check.problems(compose(["algo=dpo", "generator=dataset", "schedule.solved_at=0.9"]))
    assert problem == (
        "schedule.solved_at must be null with generator=dataset (its scores are those of stored responses), "
        "got 0.9; set schedule.solved_at=null"
    )


@pytest.mark.parametrize(("task", "doubted"), [("tldr_mini", True), ("arithmetic", False)])
def test_scores_of_a_reward_model_are_not_pass_rates(task, doubted):
    found = check.warnings(compose([f"task={task}", "schedule.solved_at=0.9"]))
    assert any("which are not pass rates" in text for text in found) == doubted


def test_replay_is_in_the_name_of_a_run_only_if_it_is_set():
    assert "replay" not in what_counts(compose([]))["schedule"], "runs of earlier versions keep their names"
    assert run_name(compose(["schedule.replay=2"])) != run_name(compose([]))
