"""Tests of the warnings about empty responses, equal scores and slow scoring."""

from __future__ import annotations

import pytest

from rlhf.assembly.parts import faster_scoring
from rlhf.config.root import Config
from rlhf.core.state import TrainState
from rlhf.loggers import logger
from rlhf.loggers.logger import ScoreDoubts
from rlhf.words.compose import compose


def run(samples: int, *words: str) -> Config:
    """Return the config of a run with so many samples of a prompt."""
    return compose([f"algo={'grpo' if samples > 1 else 'ppo'}", f"algo.samples_per_prompt={samples}", *words])


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Return the list of warnings that were printed."""
    lines: list[str] = []
    monkeypatch.setattr(logger, "say", lambda text, style=None: lines.append(text))
    return lines


def log(logger: ScoreDoubts, *rows: dict[str, float]) -> None:
    """Log one row per update."""
    usual = {
        "objective/scores": 0.5,
        "objective/tie_rate": 0.0,
        "objective/eos_rate": 0.25,
        "objective/response_tokens": 1.0,
        "time/update_s": 10.0,
        "time/score_s": 0.1,
    }
    for update, row in enumerate(rows, 1):
        state = TrainState(num_updates=len(rows))
        state.update = update
        logger.log({**usual, **row, "update": update}, state)


def test_equal_scores_of_all_samples_are_reported_once(said):
    log(ScoreDoubts(run(2), None, 0), {"objective/tie_rate": 0.9}, *[{"objective/tie_rate": 1.0}] * 3)
    (text,) = said
    assert text.startswith("warning: all samples of each prompt have the same score (mean 0.5; 25% of")


def test_an_update_with_only_empty_responses_is_reported_once(said):
    ended = {"objective/eos_rate": 1.0}
    log(ScoreDoubts(run(2), None, 0), {}, {**ended, "objective/response_tokens": 1.5}, ended, ended)
    (text,) = said
    assert text.startswith("warning: all responses of update 3 are empty (the end token alone);")


def test_one_sample_a_prompt_has_equal_scores_if_the_mean_does_not_change(said):
    log(
        ScoreDoubts(run(1), None, 0),
        *[{"objective/tie_rate": 1.0, "objective/scores": x} for x in (1, 1, 2, 1)],
    )
    assert not said
    log(ScoreDoubts(run(1), None, 0), *[{"objective/tie_rate": 1.0}] * 4)
    (text,) = said
    assert text.startswith("warning: all scores are equal (mean 0.5")


def test_rows_without_scores_give_no_warning(said):
    logger = ScoreDoubts(run(1), "do more", 0)
    state = TrainState(num_updates=1)
    for state.update in (1, 2, 3, 4):
        logger.log({"time/update_s": 1.0}, state)
    assert not said


def test_slow_scoring_is_reported_once_and_not_for_the_first_row(said):
    log(ScoreDoubts(run(2), "do more at once", 0), *[{"time/score_s": 8.0}] * 4)
    assert said == [
        "warning: scoring takes 8.0 s of the 10.0 s of an update; to make it faster, do more at once"
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"time/score_s": 4.0},
        {"time/score_s": 0.9, "time/update_s": 1.0},
        {"time/annotate_ahead_s": 8.0, "time/wait_s": 1.0},
    ],
)
def test_scoring_of_little_time_or_beside_training_is_not_slow(said, row):
    log(ScoreDoubts(run(2), "do more at once", 0), *[row] * 3)
    assert not said


def test_scoring_for_which_the_trainer_waits_is_slow(said):
    log(ScoreDoubts(run(2), "do more", 0), *[{"time/annotate_ahead_s": 8.0, "time/wait_s": 7.0}] * 3)
    assert said == ["warning: scoring takes 8.0 s of the 10.0 s of an update; to make it faster, do more"]


def test_the_remedy_for_slow_scoring_names_the_keys_of_the_scorer():
    assert faster_scoring(compose([])) is None
    mix = ["scorer=weighted", "+scorer@scorer.parts.x=http"]
    assert faster_scoring(compose(mix)) == "raise scorer.parts.x.concurrency or scorer.parts.x.batch_size"
    assert "(scorer.batched=true)" in (faster_scoring(compose(["scorer=function"])) or "")


GAME = ("task=guess_number", "environment.reply_tokens=6", "generator.response_length=40")
CUT = {"environment/cut": 1.0, "environment/turns": 1.0, "objective/response_tokens": 6.0}


@pytest.mark.parametrize(
    "words", [GAME, (*GAME, "environment.reply_tokens=50"), (*GAME, "environment.reply_tokens=null")]
)
def test_replies_that_are_all_cut_are_reported_once_with_the_limit_and_not_as_equal_scores(said, words):
    cfg = run(2, *words)
    limit = "environment.reply_tokens=6" if words is GAME else "generator.response_length=40"
    row = {**CUT, "objective/tie_rate": 1.0, "objective/response_tokens": float(limit.partition("=")[2])}
    log(ScoreDoubts(cfg, None, 0), *[row] * 3)
    (text,) = said
    key, _, value = limit.partition("=")
    assert limit in text and f"set {key}={2 * int(value)}" in text and "step" in text


def test_replies_that_are_all_cut_in_an_evaluation_are_reported(said):
    logger, state = ScoreDoubts(run(2, *GAME), None, 0), TrainState(num_updates=1)
    row = {f"eval/{name.removeprefix('objective/')}": value for name, value in CUT.items()}
    logger.evaluation(row, None, state)
    log(logger, CUT)
    (text,) = said
    assert "environment.reply_tokens=6" in text


@pytest.mark.parametrize(
    "other", [{"environment/cut": 0.9}, {"environment/turns": 1.5}, {"objective/response_tokens": 3.0}]
)
def test_a_reply_that_ended_or_another_end_token_is_no_limit_of_replies(said, other):
    log(ScoreDoubts(run(2, *GAME), None, 0), {**CUT, **other})
    assert not said
