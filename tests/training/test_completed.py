"""Tests of the stream of completed groups, with a generator whose responses take given times."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
import torch

from rlhf.config.run import Order, Stale, Unit, Update
from rlhf.core.batch import Batch, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.generators.generator import Generator, finished
from rlhf.training.events import CompletedStream
from tests.training.streams import context

LENGTH, STEP_S = 8, 0.002


class Singles(Generator):
    """Samples single responses in threads; response `sample` of row r takes `steps(r, sample)` steps."""

    def __init__(self, slots, steps=lambda row, sample: LENGTH, between=False, ends=True):
        self.count, self.steps, self.between, self.ends, self.version = slots, steps, between, ends, 0
        self.running, self.most, self.asked = set(), 0, []
        self.cuts: dict[Future, threading.Event] = {}

    slots = property(lambda self: self.count)
    oldest = property(lambda self: self.version)

    def submit(self, prompts, sampling):
        (begun,) = sampling.begun
        row, answer, cut = int(prompts.index), Future(), threading.Event()
        self.asked.append((row, begun.sample, begun.request))
        self.cuts[answer] = cut
        threading.Thread(target=self.sample, args=(prompts, row, begun.sample, answer, cut)).start()
        return answer

    def sample(self, prompts, row, sample, answer, cut):
        self.running.add(answer)
        self.most = max(self.most, len(self.running))
        steps, versions, first = self.steps(row, sample), [], self.version
        while len(versions) < steps and not (cut.is_set() and versions):
            time.sleep(STEP_S)
            versions.append(first if self.between else self.version)
        count = max(1, round(len(versions) * LENGTH / max(LENGTH, steps)))
        mask = (torch.arange(LENGTH) < count)[None, None]
        self.running.discard(answer)
        answer.set_result(
            prompts.extend(
                Rollouts,
                response_ids=torch.full((1, 1, LENGTH), 5 + versions[-1]),
                response_mask=mask,
                behaviour_logprobs=torch.zeros(1, 1, LENGTH),
                ended=torch.tensor([[self.ends and len(versions) == steps]]),
                token_versions=None if self.between else versions[-1] * mask.long(),
                version=versions[-1],
                generate_s=0.1,
            )
        )

    def when_loaded(self, call):
        self.tell = call

    def cut(self, answer):
        self.cuts[answer].set()

    def load(self, weights, version):
        self.version = version
        self.tell()


def batches(size, first=0):
    """Yield batches of prompts, in the order of their rows."""
    for start in range(first, 10_000, size):
        rows = torch.arange(start, start + size)
        ids, texts = rows[:, None], [""] * size
        yield Prompts(index=rows, texts=texts, references=texts, prompt_ids=ids, prompt_mask=ids > -1)


def stream_of(generator, *, updates=8, batch=2, samples=2, lag=2, saved=None, update=0, first=0, **schedule):
    schedule = {"order": Order.completed, "update": Update.in_flight, **schedule}
    return CompletedStream(
        context(
            generator,
            batches(batch, first),
            Sampling(samples=samples, temperature=1.0, response_length=LENGTH, purpose="train"),
            lag,
            updates,
            update=update,
            batch=batch,
            schedule=schedule,
            saved=saved,
        )
    )


def trained(stream, most=None):
    """Train on the batches of a stream, and return them."""
    found, state = [], stream.context.state
    for batch in stream:
        found.append((batch, list(stream.lines)))
        time.sleep(2 * STEP_S)
        state.update += 1
        stream.context.generator.load([], state.update)
        if len(found) == most:
            break
    return found


def long_first(row, sample):
    """Row 0 takes forty times as long as the others."""
    return LENGTH * 40 if row == 0 and sample == 0 else LENGTH


@pytest.mark.parametrize("unit", Unit)
def test_each_group_is_trained_once_and_a_long_one_does_not_hold_up_the_others(unit):
    generator = Singles(6, long_first)
    found = trained(stream_of(generator, unit=unit))
    rows = [row for batch, _ in found for row in batch.index.tolist()]
    assert sorted(rows) == list(range(16)) and rows.index(0) > 3
    assert generator.most <= 6
    assert Counter((row, sample) for row, sample, _ in generator.asked) == {
        (row, sample): 1 for row in range(16) for sample in range(2)
    }
    assert {row // 2 == request for row, _, request in generator.asked} == {True}
    for number, (batch, lines) in enumerate(found):
        assert batch.trainer_version == number and batch.response_ids.shape == (2, 2, LENGTH)
        assert [line["fate"] for line in lines] == ["trained"] * 2
        assert all(line["version"] <= number for line in lines)


@pytest.mark.parametrize("between", [False, True])
def test_every_token_has_the_version_that_sampled_it(between):
    found = trained(stream_of(Singles(6, long_first, between)))
    assert any(batch.version < batch.trainer_version for batch, _ in found)
    for batch, _ in found:
        versions, mask = batch.token_versions, batch.response_mask
        versions = torch.full_like(batch.response_ids, batch.version) if versions is None else versions
        assert torch.equal((versions + 5)[mask], batch.response_ids[mask])
        assert batch.version <= versions[mask].min()


def test_the_age_of_a_group_has_the_bound():
    found = trained(stream_of(Singles(8, long_first), lag=1, max_age=2, updates=10))
    assert max(batch.trainer_version - line["version"] for batch, lines in found for line in lines) == 2


def test_a_group_that_is_due_is_cut_and_trained_with_the_tokens_that_it_has():
    found = trained(stream_of(Singles(8, long_first), lag=1, max_age=2, stale=Stale.cut, updates=10))
    (line,) = [line for _, lines in found for line in lines if line["fate"] == "cut"]
    assert line["row"] == 0 and 1 <= line["lengths"][0] < LENGTH and line["lengths"][1] == LENGTH
    (batch,) = [batch for batch, _ in found if 0 in batch.index]
    assert not batch.ended[batch.index.tolist().index(0), 0]


def test_a_response_that_reaches_the_limit_was_not_cut():
    found = trained(stream_of(Singles(8, ends=False), updates=2))
    assert {line["fate"] for _, lines in found for line in lines} == {"trained"}


def test_a_group_that_is_too_old_is_dropped_and_its_prompt_starts_again():
    slow = iter([LENGTH * 40])
    generator = Singles(8, lambda row, sample: next(slow, LENGTH) if (row, sample) == (0, 0) else LENGTH)
    found = trained(stream_of(generator, lag=1, max_age=1, stale=Stale.drop, updates=10))
    fates = [(line["row"], line["fate"]) for _, lines in found for line in lines if line["row"] == 0]
    assert fates[0] == (0, "dropped") and sum(row == 0 for row, *_ in generator.asked) > 2
    json.dumps([lines for _, lines in found], allow_nan=False)  # a group that was dropped has ended
    assert (
        len(found) == 10
        and max(b.trainer_version - x["version"] for b, ls in found for x in ls if x["fate"] == "trained")
        <= 1
    )


@pytest.mark.parametrize(("lag", "rows"), [(0, [0]), (1, [0, 1, 2])])
def test_room_that_the_taken_batch_leaves_is_used_at_once(lag, rows):
    """With `drop`; without a lag nothing starts while the trainer works, whatever happens."""
    generator = Singles(4, lambda row, sample: LENGTH * (10 if row else 1))
    made = stream_of(generator, lag=lag, batch=1, samples=1, max_age=1, stale=Stale.drop)
    next(iter(made))
    assert [row for row, *_ in generator.asked] == rows
    generator.tell()
    assert [row for row, *_ in generator.asked] == rows


def test_a_checkpoint_has_what_ended_and_the_rest_starts_again():
    first = stream_of(Singles(6, long_first))
    before = trained(first, most=3)
    state = first.state_dict()
    generator = Singles(6)
    generator.version = 3
    drawn = 1 + max(int(prompt["index"]) for prompt in [*state["known"].values(), *state["queues"][0]])
    resumed = stream_of(generator, saved=state, update=3, first=drawn)
    begun = {number: group.version for number, group in first.rules.running.items()}
    partly = {number for number, *_ in state["responses"]}
    assert 0 in partly and begun[0] < 3
    for number, group in resumed.rules.running.items():
        assert group.version == (begun[number] if number in partly else 3)
    after = trained(resumed)
    rows = [row for batch, _ in before + after for row in batch.index.tolist()]
    assert len(after) == 5 and len(set(rows)) == 16
    ended = {(each[0], each[1]) for each in state["responses"]}
    assert ended.isdisjoint({(row, sample) for row, sample, _ in generator.asked})


def test_an_annotator_scores_whole_groups():
    class Scored(Singles):
        def resume(self, rollouts):
            return finished(rollouts.extend(Batch, scores=rollouts.response_mask.sum(-1).float()))

    found = trained(stream_of(Scored(6)))
    assert all(isinstance(batch, Batch) and batch.scores.shape == (2, 2) for batch, _ in found)


def test_an_error_of_the_generator_ends_the_stream():
    generator = Singles(6)
    generator.submit = lambda *given: (_ for _ in ()).throw(RunError("no server is left"))
    with pytest.raises(RunError, match="no server is left"):
        next(iter(stream_of(generator)))
