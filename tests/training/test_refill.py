"""Replacement of groups without signal: bound, scores, exactness at any lag, in wall and virtual time."""

from collections import Counter

import pytest
import torch

from rlhf.core.batch import Batch, Prompts
from rlhf.training.stream import Refill, RefilledStream
from tests.training.streams import context
from tests.training.test_virtual import (
    UPDATES,
    B,
    Recorder,
    Trainer,
    counted,
    equal,
    log_probs,
    prompts,
    sampling,
    stored,
    stream,
    train,
)


class Scorer:
    """Scores about half of the groups equally, and counts how often each response was scored."""

    def __init__(self, ties=False):
        self.ties, self.seen = ties, Counter()

    def __call__(self, rollouts):
        scores, sums = half(rollouts)
        for row, own in zip(rollouts.index.tolist(), sums.tolist(), strict=True):
            self.seen[row, *own] += 1
        scores = torch.zeros_like(scores) if self.ties else scores
        return rollouts.extend(Batch, scores=scores, parts={"half": scores / 2})


def half(rollouts):
    """Return scores [N, K] that tie in about half of the groups, and the sums of the tokens."""
    sums = rollouts.response_ids.masked_fill(~rollouts.response_mask, 0).sum(-1)
    return (sums % 2).float(), sums


def refilled(trainer, lag, most=8 * B, *, virtual=None, scorer=None, saved=None, batches=None):
    """Return a stream that replaces groups, in wall time or in virtual time (a rule)."""
    refill = Refill(most=most, scorer=scorer or Scorer(), note=lambda batch: None)
    if virtual:
        settings = {"in_flight": True, "spread": 1.0, "slots": 10} if virtual != "fifo" else {}
        given = {"batches": batches, "refill": refill, "update": trainer.version, "saved": saved}
        return stream(trainer, virtual, lag=lag, **given, **settings)
    given = {"update": trainer.version, "batch": B, "recorder": Recorder(), "saved": saved, "refill": refill}
    made = context(trainer.generator, batches or prompts(), sampling(), lag, UPDATES, **given)
    return RefilledStream(made)


def figures(made, name):
    rows = made.context.recorder.rows
    return [row[f"rollouts/{name}"] for row in rows if f"rollouts/{name}" in row]


def untimed(made):
    """Return the lines of groups.jsonl without the times of this machine."""
    lines = made.context.recorder.lines
    times = ("starts", "ends", "ready", "taken", "waited")
    return [{key: line[key] for key in line if key not in times} for line in lines]


@pytest.mark.parametrize(
    ("lag", "virtual"), [(0, None), (1, None), (4, None), (4, "fifo"), (1, "pace"), (4, "cut")]
)
def test_batches_have_only_groups_with_signal_and_every_response_is_scored_once(lag, virtual):
    trainer, scorer = Trainer(), Scorer()
    made = refilled(trainer, lag, virtual=virtual, scorer=scorer)
    ages, rows = [], []
    for batch in train(made, trainer):
        rows += batch.index.tolist()
        assert len(batch) == B and batch.trainer_version == trainer.version
        assert (batch.scores.amax(1) > batch.scores.amin(1)).all()
        assert torch.equal(batch.scores, half(batch)[0])
        assert torch.equal(batch.parts["half"], batch.scores / 2)
        ages.append(trainer.version - batch.version)
        versions = batch.token_versions
        for version in [batch.version] if versions is None else batch.versions():
            error = (log_probs(trainer.models[version], batch) - batch.behaviour_logprobs).abs()
            own = batch.response_mask if versions is None else batch.response_mask & (versions == version)
            assert own.any() and error[own].max() < 2e-5
    replaced = figures(made, "refilled")
    assert len(replaced) == UPDATES and sum(replaced) > UPDATES
    assert set(figures(made, "no_signal")) == {0} and {*figures(made, "refilled_share")} <= {1, None}
    assert set(scorer.seen.values()) == {1} and len(scorer.seen) == UPDATES * B + sum(replaced)
    assert max(ages) <= lag or virtual == "pace"
    lines = made.context.recorder.lines
    for update, count in enumerate(replaced, 1):
        fates = [line["fate"] for line in lines if line["update"] == update]
        assert (fates.count("replaced"), len(fates)) == (count, B + count)
    assert [line["row"] for line in lines if line["fate"] != "replaced"] == rows
    assert len({line["group"] for line in lines}) == len(lines)


def test_wall_time_without_lag_equals_virtual_time():
    trainer, other = Trainer(), Trainer()
    wall, virtual = refilled(trainer, 0), refilled(other, 0, virtual="fifo")
    for mine, theirs in zip(train(wall, trainer), train(virtual, other), strict=True):
        assert torch.allclose(
            mine.behaviour_logprobs, theirs.behaviour_logprobs, atol=1e-5
        )  # other rows in a call
        mine.behaviour_logprobs = theirs.behaviour_logprobs
        equal(mine, theirs)
    assert figures(wall, "refilled") == figures(virtual, "refilled")


@pytest.mark.parametrize("virtual", [None, "fifo"])
def test_groups_without_signal_are_trained_when_the_bound_is_reached(virtual):
    trainer = Trainer()
    made = refilled(trainer, 0, most=3, virtual=virtual, scorer=Scorer(ties=True))
    assert [len(batch) for batch in train(made, trainer)] == [B] * UPDATES
    assert set(figures(made, "no_signal")) == {B}
    assert set(figures(made, "refilled")) == {3}


@pytest.mark.parametrize(
    ("lag", "virtual"),
    [*((lag, virtual) for lag in (0, 1, 4) for virtual in (None, "fifo", "pace")), (2, "drop")],
)
def test_a_resumed_stream_continues_to_the_bit(lag, virtual):
    trainer, scorer = Trainer(), Scorer()
    whole = refilled(trainer, lag, most=3, virtual=virtual, scorer=scorer)
    expected = list(train(whole, trainer))
    for stop in (1, 4):
        first, drawn, known = Trainer(), [], Scorer()
        before = refilled(first, lag, most=3, virtual=virtual, scorer=known, batches=counted(drawn))
        batches = iter(before)
        for _ in range(stop):
            next(batches)
            first.train()
        second, saved = Trainer(stop), stored(before)
        later = prompts(len(drawn) * B)
        after = refilled(second, lag, most=3, virtual=virtual, scorer=known, saved=saved, batches=later)
        for mine, theirs in zip(train(after, second), expected[stop:], strict=True):
            equal(mine, theirs)
        assert known.seen == scorer.seen, "what is known is not scored again"
        assert untimed(before) + untimed(after) == untimed(whole)


def test_an_interrupted_scorer_leaves_a_stream_that_a_checkpoint_can_save():
    """The bound counts what was replaced before the interruption."""
    trainer = Trainer()
    expected = list(train(refilled(trainer, 1, most=3), trainer))

    class Interrupted(Scorer):
        def __call__(self, rollouts):
            if len(self.seen) > B:
                raise KeyboardInterrupt
            return super().__call__(rollouts)

    first, drawn = Trainer(), []
    made = refilled(first, 1, most=3, scorer=Interrupted(), batches=counted(drawn))
    with pytest.raises(KeyboardInterrupt):
        list(train(made, first))
    assert made.resumable and made.taken == first.version
    second = Trainer(first.version)
    later = prompts(len(drawn) * B)
    after = refilled(second, 1, most=3, saved=made.state_dict(), batches=later)
    for mine, theirs in zip(train(after, second), expected[first.version :], strict=True):
        equal(mine, theirs)


def test_a_batch_that_was_put_back_is_yielded_again():
    trainer = Trainer()
    made = refilled(trainer, 1)
    unused = next(iter(made))
    made.put_back()
    again = refilled(trainer, 1, saved=made.state_dict())
    assert isinstance(unused, Prompts) and again.taken == made.taken == 0
    equal(next(iter(again)), unused)
    assert again.taken == 1
