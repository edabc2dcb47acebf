"""Rules for the schedule and the length of runs."""

from __future__ import annotations

import pytest

from rlhf.checks import check
from rlhf.checks.check import problems, warnings
from rlhf.config.schedule import DEFAULT_EPOCHS
from rlhf.stages import words
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


@pytest.mark.parametrize("task", ["local", "preferences"])
@pytest.mark.parametrize("algo", ["rloo", "dpo", "ppo", "bok", "dpo generator=dataset"])
def test_a_run_on_own_data_passes_three_times_over_the_data(task, algo):
    cfg = compose([f"task={task}", "task.path=x", *f"algo={algo}".split()])
    assert cfg.epochs == DEFAULT_EPOCHS == 3 and cfg.schedule.prompts_per_update == 64
    assert cfg.num_updates(1000) == 47 and cfg.num_updates(5) == 1
    assert not [problem for problem in problems(cfg) if "schedule" in problem]
    assert dict(words.counts(cfg, 1000))["updates"] == "47 = 3 epochs of 1,000 prompts / 64"


def test_supervised_runs_on_own_data_keep_one_pass():
    assert compose(["task=local", "task.path=x", "algo=sft"]).epochs == 1


def test_an_explicit_length_replaces_the_default_of_own_data():
    own = ["task=local", "task.path=x", "algo=rloo"]
    cfg = compose([*own, "schedule.total_episodes=1280"])
    assert cfg.epochs is None and cfg.num_updates() == 10
    assert not [problem for problem in problems(cfg) if "schedule" in problem]
    assert compose([*own, "schedule.total_epochs=5"]).num_updates(640) == 50


def test_other_tasks_keep_the_length_of_the_algorithm():
    assert compose(["task=chat", "algo=dpo"]).schedule.total_episodes == 262144
    assert compose(["task=gsm8k", "algo=rloo"]).schedule.prompts_per_update == 256


def test_the_summary_counts_the_passes_and_warns_above_ten():
    cfg = compose(["schedule.total_episodes=25600"])
    rows = dict(words.counts(cfg, 1000))
    assert rows["passes over the data"] == "12.8 of 1,000 prompts"
    (warning,) = words.doubts(cfg, 1000)
    assert "passes 12.8 times over its 1,000 training rows" in warning
    assert "set schedule.total_episodes=6016" in warning
    assert not list(words.doubts(cfg, 2000))


def test_solved_prompts_need_a_second_pass():
    cfg = compose(["schedule.total_episodes=256", "algo.samples_per_prompt=2", "schedule.solved_at=0.9"])
    (warning,) = words.doubts(cfg, 128)
    assert "schedule.solved_at=0.9 has no effect in 1 passes over the data" in warning
    assert not list(words.doubts(cfg, 100))


def test_more_threads_than_cores_give_a_warning(monkeypatch):
    monkeypatch.setattr("rlhf.checks.generators.cpu_cores", lambda: 2)
    assert "backend.threads=64 is more than the 2 cores" in " ".join(
        warnings(compose(["backend.threads=64"]))
    )
    assert "backend.threads" not in " ".join(warnings(compose(["backend.threads=2"])))


@pytest.mark.parametrize("group", ["algo", "task", "generator", "scorer", "model"])
def test_a_section_with_the_name_of_another_option_is_refused(group):
    cfg = compose([])
    getattr(cfg, group).name = "other"
    assert f"{group}.name must not be set" in " ".join(problems(cfg))


def test_an_absurd_length_is_refused_with_a_length_that_is_possible():
    (problem,) = problems(compose([f"schedule.total_episodes={10**20}"]))
    assert "must be >= 1 and <= 1000000000" in problem and problem.endswith(
        "set schedule.total_episodes=12800"
    )
