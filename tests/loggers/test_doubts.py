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


GAME = ("task=guess_number", "environment.reply_tokens=6", "generator.response_length=40")
CUT = {"environment/cut": 1.0, "environment/turns": 1.0, "objective/response_tokens": 6.0}
EMPTY, TIES, SLOW = {"objective/eos_rate": 1.0}, {"objective/tie_rate": 1.0}, {"time/score_s": 8.0}
AHEAD = {"time/annotate_ahead_s": 8.0}
ROWS = {  # rows of a run with one or two samples a prompt, and how the only warning begins
    "equal scores of all samples": (2, [{"objective/tie_rate": 0.9}, *[TIES] * 3], "all samples of each"),
    "empty responses alone": (2, [{}, EMPTY | {"objective/response_tokens": 1.5}, EMPTY, EMPTY],
                              "all responses of update 3 are empty (the end token alone);"),
    "one sample, another mean": (1, [TIES | {"objective/scores": x} for x in (1, 1, 2, 1)], None),
    "one sample, the same mean": (1, [TIES] * 4, "all scores are equal (mean 0.5"),
    "slow, but not in the first row": (2, [SLOW] * 4, "scoring takes 8.0 s of the 10.0 s of an update;"),
    "slow in the first row": (2, [SLOW, {}, {}], None),
    "less than half of the time": (2, [{"time/score_s": 4.0}] * 3, None),
    "less than a second": (2, [{"time/score_s": 0.9, "time/update_s": 1.0}] * 3, None),
    "beside training": (2, [AHEAD | {"time/wait_s": 1.0}] * 3, None),
    "the trainer waits": (2, [AHEAD | {"time/wait_s": 7.0}] * 3, "scoring takes 8.0 s of the 10.0 s"),
    "a reply ended": (2, [CUT | {"environment/cut": 0.9}], None),
    "several turns": (2, [CUT | {"environment/turns": 1.5}], None),
    "another end token": (2, [CUT | {"objective/response_tokens": 3.0}], None),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_a_fault_of_the_settings_is_reported_once_and_nothing_else_is(said, case):
    samples, rows, begins = ROWS[case]
    log(ScoreDoubts(run(samples, *GAME), "do more at once", 0), *rows)
    assert len(said) == (begins is not None)
    assert all(text.startswith(f"warning: {begins}") for text in said)


def test_rows_without_scores_give_no_warning(said):
    logger = ScoreDoubts(run(1), "do more", 0)
    state = TrainState(num_updates=1)
    for state.update in (1, 2, 3, 4):
        logger.log({"time/update_s": 1.0}, state)
    assert not said


def test_the_remedy_for_slow_scoring_names_the_keys_of_the_scorer():
    assert faster_scoring(compose([])) is None
    mix = ["scorer=weighted", "+scorer@scorer.parts.x=http"]
    assert faster_scoring(compose(mix)) == "raise scorer.parts.x.concurrency or scorer.parts.x.batch_size"
    assert "(scorer.batched=true)" in (faster_scoring(compose(["scorer=function"])) or "")


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
