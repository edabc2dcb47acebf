"""Prerequisites of a run: which, in which order, and what each of them reads."""

from __future__ import annotations

import pytest

from rlhf.core.errors import UserError
from rlhf.stages.prerequisites import (
    PAIRS,
    REWARD,
    SFT,
    complete,
    exchange,
    model_folder,
    names,
    pairs_folder,
    prerequisites,
    stage,
)
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


def made(*words: str) -> dict[str, str]:
    """Return the folder of each prerequisite of a run with the seed 2 of its stages, by its name."""
    found = prerequisites(compose([*words, "stages.seed=2"]), never)[1]
    return {artefact.name: artefact.folder.name for artefact in found}


def test_members_of_an_ensemble_are_models_of_the_same_pairs_that_differ_in_their_seeds():
    cfg, found = prerequisites(compose(["stages.members=3", "stages.seed=2"]), never)
    assert [each.name for each in found] == names(compose(["stages.members=3"]))
    assert names(compose(["stages.members=3"])) == [SFT, PAIRS, *(f"{REWARD} {k}/3" for k in (1, 2, 3))]
    assert cfg.model.reward == [str(each.folder / "model") for each in found[2:]]
    several, one = made("stages.members=3"), made()
    assert several[f"{REWARD} 1/3"] == one[REWARD], "it is shared with runs of one reward model"
    assert len({*several.values()}) == 5 and several[PAIRS] == one[PAIRS]
    assert made("stages.members=2").items() - several.items() <= {
        (f"{REWARD} {k}/2", several[f"{REWARD} {k}/3"]) for k in (1, 2)
    }


def test_settings_of_ensembles_and_noise_keep_the_folders_of_earlier_versions():
    found = prerequisites(compose(["algo=rloo"]), never)[1]
    names_then = ["sft-tldr_mini-41485907", "pairs-tldr_mini-099769f0", "reward-tldr_mini-36bd09d8"]
    assert [each.folder.name for each in found] == names_then


def test_label_noise_makes_other_pairs_and_reward_models_from_the_same_sft_model():
    clean, noisy = made(), made("stages.label_noise=0.25")
    assert clean[SFT] == noisy[SFT] and clean[PAIRS] != noisy[PAIRS] and clean[REWARD] != noisy[REWARD]
    noises = [compose([f"stages.label_noise={each}", "generator=dataset"]) for each in (0, 0.1, 0.2)]
    assert len({*map(pairs_folder, noises)}) == 3, "also of a run that trains on the pairs itself"


def test_label_noise_exchanges_a_share_of_the_pairs_and_more_pairs_keep_those_of_the_first():
    def noisy(count: int, share: float, seed: int = 1) -> list[bool]:
        columns = {"prompt": [*"p" * count], "chosen": ["good"] * count, "rejected": ["bad"] * count}
        exchange(columns, share, seed)
        assert all(
            {a, b} == {"good", "bad"} for a, b in zip(columns["chosen"], columns["rejected"], strict=True)
        )
        return [text == "bad" for text in columns["chosen"]]

    assert not any(noisy(512, 0.0)) and all(noisy(512, 1.0))
    assert 0.22 < sum(noisy(512, 0.25)) / 512 < 0.28
    assert noisy(2048, 0.25)[:512] == noisy(512, 0.25) != noisy(512, 0.25, seed=2)
    assert {i for i, flip in enumerate(noisy(512, 0.1)) if flip} < {
        i for i, flip in enumerate(noisy(512, 0.25)) if flip
    }
