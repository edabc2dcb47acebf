"""Tests of the rules for data folders of a task: a run checks only the folders that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.checks import check
from rlhf.words.compose import compose

PROMPT = '{"query": "a", "reference_response": "b"}'
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
MODELS = ["model.policy=some/policy", "model.reward=some/reward", "task.max_prompt_tokens=64"]


def write(folder: Path, row: str) -> str:
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(row)
    return str(folder)


def problems(*overrides: str) -> list[str]:
    return check.problems(compose(["task=tldr", *MODELS, *overrides]))


@pytest.mark.parametrize(
    ("algo", "reads_prompts", "reads_pairs"),
    [
        (["algo=dpo"], True, False),
        (["algo=dpo", "generator=dataset"], True, True),  # trained on pairs, evaluated on prompts
        (["algo=sft", "model.base=some/base"], True, False),
        (["algo=reward"], False, True),
    ],
    ids=str,
)
def test_the_folders_that_a_run_reads_must_exist(tmp_path, algo, reads_prompts, reads_pairs):
    prompts, pairs = write(tmp_path / "prompts", PROMPT), write(tmp_path / "pairs", PAIR)
    right = [f"task.path={prompts}", f"task.preferences_path={pairs}"]
    assert problems(*algo, *right) == []
    for key, read in (("task.path", reads_prompts), ("task.preferences_path", reads_pairs)):
        found = problems(*algo, *right, f"{key}={tmp_path / 'nowhere'}")
        assert bool(found) == read and all(text.startswith(f"{key} must be a folder") for text in found)


def test_a_folder_of_pairs_that_a_run_does_not_read_is_a_warning(tmp_path):
    pairs = write(tmp_path / "pairs", PAIR)
    words = ["task=tldr", *MODELS, f"task.preferences_path={pairs}"]
    (warning,) = check.warnings(compose(words))
    assert warning.startswith("task.preferences_path has no effect with algo=dpo and generator=hf")
    assert check.warnings(compose([*words, "generator=dataset"])) == []


def test_setting_of_a_data_set_that_is_not_read_gives_a_warning(tmp_path):
    prompts, pairs = write(tmp_path / "prompts", PROMPT), write(tmp_path / "pairs", PAIR)
    words = ["task=preferences", "algo=reward", *MODELS, f"task.preferences_path={pairs}"]
    assert check.warnings(compose(words)) == []
    found = check.warnings(compose([*words, f"task.path={prompts}", "task.preferences_name=some/pairs"]))
    assert sorted(text.split(" ")[0] for text in found) == ["task.path", "task.preferences_name"]


def test_chat_reward_model_on_generated_data_needs_no_pairs():
    words = ["task=chat", "model=llama_8b", "algo=reward", "model.policy=some/sft"]
    assert len(check.problems(compose(words))) == 1
    assert check.problems(compose([*words, "stages.stand_ins=true"])) == []
