"""Probes of rewards, and trials of judges: what is an alarm, and how sure the figures of a judge are."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from rlhf.config.scorers import JudgeKind
from rlhf.core.errors import RunError
from rlhf.stages.probes import agreement, judged, probed
from rlhf.text.encoding import encode_prompts
from tests.fake_judge import FakeJudge, served
from tests.scorers.test_judge import TOKENIZER, scorer_of
from tests.stages.rewards_to_probe import BATCHED, FAULTS, SOUND, SUMS


def alarms(data, reward, batched) -> list[str]:
    prompts, references = map(list, zip(*data, strict=True))

    def score(rows, texts):
        groups = [prompts[i] for i in rows], list(texts), [references[i] for i in rows]
        try:
            found = reward(*groups) if batched else [reward(*each) for each in zip(*groups, strict=True)]
        except Exception as error:
            raise RunError(repr(error)) from None
        if not np.isfinite(found).all():
            raise RunError("not finite")
        return np.array(found, float)

    return [line for line, alarm in probed(score, prompts, references, 0.0) if alarm]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_raises_an_alarm(name):
    random.seed(0)
    assert alarms(*FAULTS[name], name in BATCHED)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reward_raises_no_alarm(name):
    assert alarms(*SOUND[name], False) == []


def test_the_format_that_a_reward_reads_is_found():
    data, reward = SOUND["tags_and_a_share_for_the_format"]
    prompts, references = map(list, zip(*data, strict=True))

    def score(rows, texts):
        return np.array([reward("", text, references[i]) for i, text in zip(rows, texts, strict=True)])

    lines = probed(score, prompts, references, 0.0)
    assert float(next(lines)[0].split()[0]) == 1


def test_a_difference_below_the_tolerance_is_no_difference():
    prompts, references = map(list, zip(*SUMS, strict=True))
    noisy = np.random.default_rng(0)

    def score(rows, texts):
        right = [text == references[i] for i, text in zip(rows, texts, strict=True)]
        return np.array(right) + noisy.uniform(-1e-3, 1e-3, len(right))

    assert [line for line, alarm in probed(score, prompts, references, 1e-2) if alarm] == []
    assert [line for line, alarm in probed(score, prompts, references, 1e-4) if alarm]


# -- judges ----------------------------------------------------------------------------------------------


def verdicts(draw, position=0.0, noise=0.0, drift=0.0, repeats=False, pairs=32) -> np.ndarray:
    """Return the verdicts of a judge that knows the better response, the first one; see `agreement`.

    Args:
        draw: generator of random numbers.
        position: share of the questions that are answered with the response shown first.
        noise: share of the other questions with a random answer.
        drift: the position bias at the beginning is lower, and at the end higher, by this number.
        repeats: whether a question that is repeated gets the same answer.
        pairs: number of pairs.
    """
    shape = 1 if repeats else 2, 2, pairs
    bias = position + drift * np.linspace(-1, 1, pairs)
    right = np.array([1, -1])[None, :, None] * np.ones(shape)  # the response shown first is right, then wrong
    won = np.where(draw.random(shape) < noise, draw.choice([-1, 1], shape), right)
    won = np.where(draw.random(shape) < bias, 1, won)
    return np.broadcast_to(won * [[1], [-1]], (2, 2, pairs))


BIASES = [
    (p, noise, 0.0, repeats) for p in (0, 0.05, 0.1, 0.2, 0.4) for noise in (0, 0.3) for repeats in (0, 1)
]


@pytest.mark.parametrize(("position", "noise", "drift", "repeats"), [*BIASES, (0.2, 0.1, 0.2, False)])
def test_the_interval_of_the_position_bias_contains_the_truth(position, noise, drift, repeats):
    draw, inside = np.random.default_rng(1), 0
    for _ in range(200):
        bias = agreement(verdicts(draw, position, noise, drift, bool(repeats)))["position bias"]
        inside += bias.low <= position <= bias.high
    assert inside >= 190


def test_the_intervals_of_a_judge_are_not_wider_than_necessary():
    draw = np.random.default_rng(2)
    found = [agreement(verdicts(draw, 0.2, 0.3))["position bias"] for _ in range(100)]
    spread = np.std([each.centre for each in found])
    assert np.mean([each.high - each.low for each in found]) < 1.25 * 2 * 1.96 * spread


def test_consistency_and_repetition_of_a_judge_are_shares_of_pairs():
    draw = np.random.default_rng(3)
    found = agreement(verdicts(draw, 0.3, 0.0, pairs=20_000))
    assert found["consistency"].centre == pytest.approx(0.7, abs=0.01)
    assert found["repetition"].centre == pytest.approx((1 + 0.7**2 + 0.3**2) / 2, abs=0.01)
    assert found["first"].centre == pytest.approx(0.85, abs=0.01)
    assert agreement(verdicts(draw, 0.3, repeats=True))["repetition"].centre == 1


PROMPTS = encode_prompts(torch.arange(32), [f"w{i}" for i in range(32)], ["w8"] * 32, TOKENIZER)
PAIRS = [
    ("w1 w2 w3" if i % 2 else "w2", "w1" if i % 2 else "w3 w4") for i in range(32)
]  # half: the longer one


def chosen(prompt: str, response: str) -> float:
    """Return whether a response is the first one of a pair, with padding or without."""
    return float(response.startswith(("w1 w2", "w2")))


def trial(judge: FakeJudge, **settings) -> tuple[dict[str, list[float]], bool]:
    """Return estimate and interval of each figure in percent, and whether the judge is refused."""
    with served(judge):
        lines = [*judged(scorer_of(judge, **settings), PROMPTS, PAIRS, "w1")]
    names = ["bias", "consistency", "repetition", "separation", "first", "longer", "unreadable"]
    found = [[float(each) for each in re.findall(r"-?\d+\.\d", line)] for line, alarm in lines if not alarm]
    return dict(zip(names, found, strict=True)), any(alarm for _, alarm in lines)


def test_a_fair_judge_passes_its_trial():
    found, refused = trial(FakeJudge(chosen), prices=[1.0, 2.0])
    assert not refused and [found[name][0] for name in ("bias", "consistency", "first")] == [0, 100, 100]
    assert found["longer"][0] == 50 and found["unreadable"][0] == 0


USELESS = [FakeJudge(position=1.0), FakeJudge(noise=1.0), FakeJudge(noise=1.0, drift=True)]


@pytest.mark.parametrize("judge", [*USELESS, FakeJudge(lambda prompt, response: 1.0)])
def test_a_judge_that_contradicts_itself_or_decides_nothing_is_refused(judge):
    found, refused = trial(judge)
    assert refused
    if judge.position:
        assert found["bias"] == [100, *found["bias"][1:]] and found["consistency"][0] == 0


def test_the_trial_measures_position_bias_noise_and_length():
    found, refused = trial(FakeJudge(chosen, position=0.25, drift=True))
    assert found["bias"][1] - 5 < 25 < found["bias"][2] + 5 and found["repetition"][0] < 100 and not refused
    found, refused = trial(FakeJudge())  # the longer one wins
    assert found["longer"][0] == 100 and found["first"][0] == 50 and found["bias"][0] == 0
    found, _ = trial(FakeJudge(chosen, garbage=0.2), unreadable=0.5)
    assert 5 < found["unreadable"][0] < 35
    with pytest.raises(RunError, match="cannot be read"):
        trial(FakeJudge(garbage=0.5))


def test_a_judge_of_one_response_is_measured_by_repeated_questions():
    found, refused = trial(FakeJudge(), kind=JudgeKind.grade)
    assert not refused and found["repetition"][0] == 100
    _, refused = trial(FakeJudge(noise=1.0, drift=True), kind=JudgeKind.grade)
    assert refused
