"""The stage that is offered after a supervised run: its algorithm, its models, and that its checks pass."""

import json
from pathlib import Path

import pytest

from rlhf.checks.check import problems
from rlhf.core.errors import override
from rlhf.runs.folder import RunFolder
from rlhf.stages.words import next_stage
from rlhf.words.compose import compose
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_tokenizer

PAIRS = {"chosen": " b", "rejected": " c"}
ANSWERS = {"response": " b"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with the final models of two runs: `sft/model` and `reward/model`."""
    folder, tokenizer = tmp_path_factory.mktemp("runs"), tiny_tokenizer()
    for name, make in (("sft", tiny_lm), ("reward", tiny_classifier)):
        make(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(folder / name / "model")
    return folder


@pytest.fixture
def stage(runs, monkeypatch):
    """`stage(algo, *overrides, row=...)` returns the overrides of the stage after a run on rows of a file."""
    monkeypatch.chdir(runs)

    def get(algo, *overrides, row=None):
        if row is not None:
            rows = [{**row, "prompt": str(i)} for i in range(20)]
            Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            overrides = ("task=local", "task.path=mine.jsonl", *overrides)
        return next_stage(compose([f"algo={algo}", *overrides]), RunFolder(Path(algo)), "sft/model")

    return get


def words(found):
    return [override(key, value) for key, value in found.items()]


def test_after_sft_on_generated_posts_comes_dpo_with_the_task_of_the_run(stage):
    found = stage("sft", "task.train_size=512", "optim.lr=1e-3", "schedule.total_episodes=64")
    assert words(found) == [*("algo=dpo", "task=tldr_mini", "task.train_size=512", "model.policy=sft/model")]
    assert not problems(compose(words(found)))


def test_after_sft_with_answers_that_a_program_checks_comes_grpo(stage):
    assert stage("sft", "task=arithmetic")["algo"] == "grpo"


def test_after_sft_on_the_chosen_responses_of_pairs_comes_a_reward_model(stage):
    found = stage("sft", "model.base=x", "generator.response_length=8", row=PAIRS)
    assert found["algo"] == "reward" and found["model.policy"] == "sft/model"
    assert found["generator.response_length"] == 8 and "model.base" not in found
    assert not problems(compose(words(found)))


def test_after_sft_on_answers_comes_rl_with_a_function_that_the_user_names(stage):
    found = stage("sft", "model.base=x", row=ANSWERS)
    assert (found["algo"], found["scorer"], found["scorer.path"]) == (
        "rloo",
        "function",
        "<file>.py:<function>",
    )


def test_after_a_reward_model_comes_dpo_of_its_initial_policy_with_the_reward_model(stage):
    found = stage("reward", "model.policy=x", row=PAIRS)
    assert found["algo"] == "dpo" and found["task.path"] == "mine.jsonl"
    assert (found["model.policy"], found["model.reward"]) == ("sft/model", "reward/model")


def test_dpo_with_a_reward_model_gets_no_pairs_that_it_would_not_read(stage):
    found = stage("reward", "model.policy=x", "task.preferences_path=pairs")
    assert found["algo"] == "dpo" and "task.preferences_path" not in found


def test_after_a_policy_no_stage_follows(stage):
    assert stage("dpo") is None
