"""The stream of rollouts: order of requests and loads, and at most `max_lag` later requests in flight."""

import gc
import itertools
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.generators.generator import Generator, finished
from rlhf.training.stream import Stream
from tests.training.streams import context


class FakeGenerator(Generator):
    def __init__(self):
        self.version, self.requests = 0, []

    def submit(self, prompts, sampling):
        self.requests.append(sampling.request)
        tokens = torch.full((1, 1, 1), sampling.request)
        return finished(
            prompts.extend(
                Rollouts,
                response_ids=tokens,
                response_mask=tokens > -1,
                ended=torch.ones(1, 1, dtype=torch.bool),
                behaviour_logprobs=torch.zeros(1, 1, 1),
                version=self.version,
                generate_s=0.5,
            )
        )

    def load(self, weights, version):
        self.version = version


def prompts(start, count):
    for row in range(start, start + count):
        ids = torch.tensor([[row]])
        yield Prompts(
            index=torch.tensor([row]), texts=[""], references=[""], prompt_ids=ids, prompt_mask=ids > -1
        )


def sampling(request=0):
    return Sampling(samples=1, temperature=1.0, response_length=1, purpose="train", request=request)


def train(stream, generator, updates, version=0):
    """Consume a stream like the training loop; return (row, sampling version, requests so far) per batch."""
    seen = []
    for rollouts in itertools.islice(stream, updates):
        assert rollouts.trainer_version == version
        seen.append((int(rollouts.index), rollouts.version, len(generator.requests)))
        version += 1
        generator.load(None, version)
    return seen


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_batch_t_is_sampled_by_version_max_0_t_minus_lag(lag):
    generator = FakeGenerator()
    seen = train(Stream(context(generator, prompts(0, 6), sampling(), lag, 6)), generator, 6)
    assert [(row, version) for row, version, _ in seen] == [(t, max(0, t - lag)) for t in range(6)]
    assert [made for _, _, made in seen] == [min(6, t + 1 + lag) for t in range(6)]


def test_the_stream_ends_after_its_last_prompt():
    assert len(list(Stream(context(FakeGenerator(), prompts(0, 3), sampling(), 2, 3)))) == 3


def test_a_resumed_stream_first_yields_the_rollouts_that_were_in_flight():
    generator = FakeGenerator()
    whole = train(Stream(context(generator, prompts(0, 6), sampling(), 2, 6)), generator, 6)

    generator = FakeGenerator()
    stream = Stream(context(generator, prompts(0, 6), sampling(), 2, 6))
    first = train(stream, generator, 3)
    kept = stream.state_dict()
    generator = FakeGenerator()
    generator.load(None, 3)
    done = 3 + len(kept)
    stream = Stream(context(generator, prompts(done, 6 - done), sampling(), 2, 6, update=3, saved=kept))
    second = train(stream, generator, 3, version=3)

    assert [s[:2] for s in first + second] == [s[:2] for s in whole]
    assert generator.requests == list(range(done, 6))


def test_rollouts_of_a_checkpoint_without_a_trainer_version_get_it_from_the_stream():
    generator, kept = FakeGenerator(), []
    for request, given in enumerate(prompts(3, 2), start=3):
        packed = generator.submit(given, sampling(request)).result().as_dict()
        del packed["trainer_version"]  # as in checkpoints of earlier versions
        kept.append(packed)
    stream = Stream(context(generator, prompts(5, 1), sampling(), 2, 6, update=3, saved=kept))
    assert [rollouts.trainer_version for rollouts in stream] == [3, 4, 5]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_batch_that_was_put_back_is_the_first_one_in_flight(lag):
    stream = Stream(context(FakeGenerator(), prompts(0, 6), sampling(), lag, 6))
    assert stream.taken == 0
    batches = iter(stream)
    next(batches), next(batches)
    assert stream.taken == 2
    stream.put_back()
    assert stream.taken == 1
    assert [int(packed["index"]) for packed in stream.state_dict()] == [1, 2, 3][: lag + 1]
    again = next(batches)
    assert int(again.index) == 1 and again.trainer_version == 1


def test_each_group_has_a_line_with_its_update_version_and_times():
    generator, lines = FakeGenerator(), []
    made = context(generator, prompts(7, 4), sampling(), 2, 4, wall_s=100.0)
    made.recorder.groups = lines.extend
    stream = Stream(made)
    train(stream, generator, 4)
    assert [(line["update"], line["group"], line["row"]) for line in lines] == [
        (1, 0, 7),
        (2, 1, 8),
        (3, 2, 9),
        (4, 3, 10),
    ]
    assert [line["version"] for line in lines] == [0, 0, 0, 1]
    for line in lines:
        assert line["starts"][0] == line["ready"] - 0.5 and line["lengths"] == [1]
        assert 100 <= line["ready"] <= line["taken"] < 200 and line["waited"] >= 0


def test_a_request_whose_end_is_noted_after_its_result_was_taken_is_not_kept():
    class Late(Future):
        def add_done_callback(self, fn):
            callbacks.append(partial(fn, self))

    class LateGenerator(FakeGenerator):
        def submit(self, given, sampling):
            future = Late()
            future.set_result(super().submit(given, sampling).result())
            return future

    callbacks, generator = [], LateGenerator()
    stream = Stream(context(generator, prompts(0, 4), sampling(), 0, 4))
    for _ in stream:
        callbacks.pop()()
    gc.collect()
    assert not stream.ends
