"""Rules for the schedule and the length of runs."""

from __future__ import annotations

import pytest

from rlhf.checks.check import problems
from rlhf.config.run import DEFAULT_EPOCHS
from rlhf.stages import words
from rlhf.words.compose import compose


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
