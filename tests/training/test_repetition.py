"""Tests of the hint about repetition: counts of n-grams, the trend of both numbers, one hint, resuming."""

import json
import random
from dataclasses import replace

import pytest
import torch

from rlhf.core.metrics import Stat
from rlhf.core.state import TrainState
from rlhf.training.recorder import POINTS, Recorder, RepetitionRule, repeated, rises
from tests.tiny_models import tiny_rollouts
from tests.training.test_recorder import Kept, NoEngine

NOISE = random.Random(0)


def response(repetition, length=64):
    """Return tokens that end with one token many times, so that this share of the 4-grams is repeated."""
    loop = round(repetition * (length - 3))
    return [*range(length - loop), *[length - loop - 1] * loop]


def rollouts(*responses):
    """Return ids and mask [N, 1, T] of responses of different lengths."""
    width = max(map(len, responses))
    ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in responses])
    mask = torch.tensor([[i < len(each) for i in range(width)] for each in responses])
    return ids[:, None], mask[:, None]


def hints(rows, rule=None):
    """Return the hints for rows of (score, responses), with the updates at which they are given."""
    rule = rule or RepetitionRule()
    found = []
    for update, (score, responses) in enumerate(rows, 1):
        rule.add(*rollouts(*responses))
        if text := rule.observe({"update": update, "objective/scores": score}):
            found.append((update, text))
    return found


def rising(count, first, last):
    return [first + (last - first) * i / (count - 1) for i in range(count)]


@pytest.mark.parametrize(
    ("tokens", "again", "grams"),
    [
        (list(range(40)), 0, 37),
        ([7] * 40, 36, 37),
        ([1, 2, 3, 4, 5] * 8, 32, 37),
        ([*range(40), 0, 1, 2, 3], 1, 41),
        ([*range(64), 0, 1, 2, 3], 1, 65),  # 64 tokens before
        ([*range(65), 0, 1, 2, 3], 0, 66),  # 65 tokens before
        ([3, 2, 1, 0, *range(40)], 0, 41),  # another order of the same tokens
        ([7] * 31, 0, 0),  # a short response
    ],
)
def test_an_n_gram_is_repeated_if_it_occurred_within_64_tokens_before(tokens, again, grams):
    ids, mask = rollouts(tokens)
    assert repeated(ids[:, 0], mask[:, 0]).tolist() == [again, grams, int(len(tokens) >= 32)]


def test_padding_does_not_count_and_responses_are_compared_with_themselves_only():
    long = list(range(100, 200))
    ids, mask = rollouts([7] * 40, long, long, [5] * 10)
    assert repeated(ids[:, 0], mask[:, 0]).tolist() == [36, 37 + 97 + 97, 3]
    ids, mask = rollouts([7] * 40, [0] * 200)
    assert repeated(ids[:1, 0], mask[:1, 0]).tolist() == [36, 37, 1], "padded to 200 tokens"


def test_no_two_n_grams_of_random_tokens_are_taken_for_equal():
    ids = torch.stack([torch.randperm(150_000, generator=torch.Generator().manual_seed(3))[:2048]] * 4)
    assert repeated(ids, torch.ones_like(ids, dtype=torch.bool))[0] == 0


def test_at_most_64_responses_of_an_update_are_measured():
    rule = RepetitionRule()
    ids = torch.arange(40).expand(50, 4, 40).clone()
    ids[::2] = 7
    rule.add(ids, torch.ones_like(ids, dtype=torch.bool))
    assert rule.counts[2:] == [50, 50] and rule.counts[0] / rule.counts[1] == pytest.approx(
        36 / 37 / 2, abs=0.02
    )


def test_noise_without_a_trend_rises_in_less_than_one_of_300_windows():
    trials = 3000
    found = sum(rises([NOISE.gauss(0, 1) for _ in range(POINTS)]) for _ in range(trials))
    assert found / trials < 1 / 300
    assert rises(range(POINTS)) and not rises([1.0] * POINTS) and not rises(range(POINTS, 0, -1))
    assert rises([i + NOISE.gauss(0, 2) for i in range(POINTS)])  # noise of an eighth of the rise


@pytest.mark.parametrize("count", [16, 64, 256])
def test_both_rising_gives_one_hint_whatever_the_pace(count):
    rows = zip(rising(count, 0.1, 0.9), map(response, rising(count, 0.02, 0.6)), strict=True)
    ((update, text),) = hints([(score, [each] * 4) for score, each in rows])
    assert 16 <= update <= count
    assert text.startswith("responses repeat themselves more while the reward rises: ")
    assert "this is a hint" in text and f"at update {update}" in text


@pytest.mark.parametrize(
    ("scores", "shares"),
    [
        (rising(64, 0.9, 0.1), rising(64, 0.0, 0.6)),  # the reward falls
        ([0.5] * 64, rising(64, 0.0, 0.6)),  # the reward stays
        ([NOISE.gauss(0.5, 0.3) for _ in range(64)], rising(64, 0.0, 0.6)),  # a noisy reward
        (rising(64, 0.1, 0.9), [0.6] * 64),  # the responses were repetitive from the beginning
        (rising(64, 0.1, 0.9), rising(64, 0.0, 0.22)),  # little repetition
        (rising(64, 0.1, 0.9), rising(64, 0.4, 0.48)),  # a small increase
        (rising(64, 0.1, 0.9), [NOISE.choice([0.0, 0.6]) for _ in range(64)]),  # noisy repetition
        (rising(64, 0.1, 0.9), rising(64, 0.6, 0.0)),  # the repetition falls
        (rising(15, 0.1, 0.9), rising(15, 0.0, 0.6)),  # too few rows
    ],
)
def test_otherwise_there_is_no_hint(scores, shares):
    assert not hints([(score, [response(share)]) for score, share in zip(scores, shares, strict=True)])


def test_short_responses_give_no_hint_and_a_few_long_ones_do_not_count():
    rows = list(zip(rising(64, 0.1, 0.9), rising(64, 0.0, 0.6), strict=True))
    assert not hints([(score, [response(share, length=31)] * 4) for score, share in rows])
    assert not hints([(score, [response(share), *[[1] * 20] * 4]) for score, share in rows])
    assert hints([(score, [response(share), *[[1] * 20] * 3]) for score, share in rows])


def test_longer_responses_of_the_same_text_are_not_more_repetitive():
    sentence = lambda: NOISE.sample(range(1000), 8)  # noqa: E731
    phrases = [sentence() for _ in range(40)]  # a text that uses its phrases again, far apart
    lengths = [round(length) for length in rising(64, 40, 1000)]
    texts = [[token for phrase in phrases * 4 for token in phrase][:length] for length in lengths]
    assert not hints(zip(rising(64, 0.1, 0.9), ([text] for text in texts), strict=True))


def end_update(recorder, state, score, tokens):
    ids, mask = rollouts(*[tokens] * 4)
    batch = replace(tiny_rollouts(), response_ids=ids, response_mask=mask, token_versions=None)
    recorder.add({"objective/scores": Stat(score, 1.0)})
    state.advance(batch)
    recorder.flush(state, batch, NoEngine())


def test_a_resumed_run_gives_the_same_single_hint_and_rows_have_no_new_metric():
    def recorder_of(kept, rule):
        recorder = Recorder(2, "eval/win_rate", 1e-4, expected=(), repetition=rule)
        recorder.open([kept])
        return recorder

    whole, parts, without = Kept(), Kept(), Kept()
    states = [TrainState(num_updates=48) for _ in range(3)]
    recorders = [recorder_of(whole, RepetitionRule()), recorder_of(parts, RepetitionRule())]
    recorders.append(recorder_of(without, RepetitionRule(given=True)))
    for number, (score, share) in enumerate(zip(rising(48, 0.1, 0.9), rising(48, 0, 0.6), strict=True)):
        for recorder, state in zip(recorders, states, strict=True):
            end_update(recorder, state, score, response(share))
        if number in (4, 40):  # in the middle of a row, and after the hint
            saved = json.loads(json.dumps(recorders[1].state_dict()))
            recorders[1] = recorder_of(parts, RepetitionRule())
            recorders[1].load_state_dict(saved)
    assert whole.warnings == parts.warnings and len(whole.warnings) == 1
    assert recorders[0].repetition.rows == recorders[1].repetition.rows and not without.warnings
    keys = [list(map(list, kept.rows)) for kept in (whole, without)]
    assert keys[0] == keys[1]


def test_rows_without_scores_give_no_hint():
    rule = RepetitionRule()
    for share in rising(64, 0.0, 0.6):
        rule.add(*rollouts(response(share)))
        assert rule.observe({"update": 1}) is None
    assert not rule.rows
