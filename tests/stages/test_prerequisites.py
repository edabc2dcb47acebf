"""Prerequisites of a run: which, in which order, and what each of them reads."""

from __future__ import annotations

import pytest

from rlhf.core.errors import UserError
from rlhf.stages.prerequisites import PAIRS, REWARD, SFT, complete, model_folder, names, prerequisites, stage
from rlhf.words.compose import compose


def never(*_, **__):
    pytest.fail("a stage was started")


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ([], [SFT, PAIRS, REWARD]),
        (["algo=sft"], []),
        (["algo=reward"], [SFT, PAIRS]),
        (["model.policy=me/sft"], [PAIRS, REWARD]),
        (["generator=dataset", "scorer=reward_model"], [SFT, PAIRS, REWARD]),
        (["scorer=facts"], [SFT]),
        (["task=tldr", "model=pythia_410m"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_prerequisites_are_those_that_the_run_does_not_name(words, due):
    cfg = compose(words)
    assert [artefact.name for artefact in prerequisites(cfg, never)[1]] == names(cfg) == due


def test_an_evaluation_without_scores_needs_no_reward_model():
    assert names(compose([]), reward=False) == [SFT]


def test_reward_model_of_a_run_on_stored_pairs_is_trained_on_the_same_pairs():
    words = ["generator=dataset", "scorer=reward_model"]
    cfg, (_, pairs, reward) = prerequisites(compose(words), never)
    assert cfg.task.preferences_path == str(pairs.folder)
    assert model_folder(stage(cfg, "reward")).path == reward.folder
    assert cfg.model.reward == str(reward.folder / "model")


def test_configs_of_all_stages_are_checked_before_the_first_stage_starts(tmp_path):
    cfg = compose([f"cache_dir={tmp_path}", 'stages.reward=["optim.lr=nan"]'])
    with pytest.raises(UserError, match="in the stage algo=reward that this run needs: optim.lr must be"):
        complete(cfg, never)
    assert not any(tmp_path.iterdir())
