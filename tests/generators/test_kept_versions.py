"""The number of copies of the weights at a large lag, for each kind of generator, and its memory plan."""

import itertools
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.generators import most_versions
from rlhf.core.batch import Sampling
from rlhf.core.errors import RunError
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.generators.process import Replica, Replicas, WorkerGenerator
from rlhf.generators.weights import GpuWeights, SharedWeights
from rlhf.memory.plan import plan
from rlhf.processes.worker import Limits
from rlhf.training.stream import Stream
from rlhf.words.compose import compose
from tests.processes.test_worker import prompts
from tests.tiny_models import tiny_lm
from tests.training.streams import context

LAG, UPDATES = 64, 80
SECONDS = 0.004  # time of a request, longer than the time of an update


@dataclass
class Answered:
    """Rollouts of a generator without a process."""

    version: int
    trainer_version: int = 0
    behaviour_logprobs: None = None

    def __len__(self) -> int:
        return 0


class Threaded(WorkerGenerator):
    """A generator without a process: the carrier thread answers the jobs.

    `slow`: a request takes longer than an update. `fails`: number of the request at which the generator
    fails.
    """

    def __init__(self, tmp_path, store, slow, in_flight=False, fails=None):
        self.slow, self.fails = slow, fails
        limits = Limits(start_s=60, request_s=60, restarts=0)
        super().__init__(None, tmp_path / "log", {}, limits, in_flight, store)

    def start(self):
        self.channel = SimpleNamespace(shut=lambda: None, close=lambda: None)
        self.process = SimpleNamespace(poll=lambda: None, ending=str, end=lambda: None, kill_all=lambda: None)

    def ask(self, method, *arguments, limit=None):
        (manifest,) = arguments if method == "load" else (None,)
        return None if manifest is None else (manifest.version, manifest.checksums())

    def sample(self, prompts, sampling):
        if sampling.request == self.fails:
            raise RunError("out of ideas")
        oldest = self.confirmed.version
        time.sleep(SECONDS if self.slow else 0)
        self.overtake()
        while self.loads:
            self.hand_over(self.loads[0])
            self.loads.popleft()
        return Answered(oldest)


class ThreadedReplica(Threaded, Replica):
    pass


class Counting:
    """A mixin of a store that records the largest number of versions that exist after a write."""

    largest = 0

    def write(self, weights, version):
        manifest = super().write(weights, version)
        self.largest = max(self.largest, self.kept)
        return manifest


class CountingShared(Counting, SharedWeights):
    pass


class CountingGpu(Counting, GpuWeights):
    """The store of vLLM's GPU transfers, on the CPU."""

    def __init__(self):
        super().__init__(torch.device("cpu"), torch.float32)


def train(generator, lag=LAG, updates=UPDATES, keeps_up=False):
    """Load and request as the training loop does; return the version that sampled each batch.

    `keeps_up`: an update ends after the generator has answered all requests.
    """
    sampling = Sampling(samples=1, temperature=1.0, response_length=2, purpose="train")
    stream = Stream(context(generator, itertools.repeat(prompts()), sampling, lag, updates))
    generator.load([("weight", torch.zeros(1))], 0)
    seen = []
    for rollouts in stream:
        seen.append(rollouts.version)
        while keeps_up and generator.unanswered:
            time.sleep(0.001)
        generator.load([("weight", torch.full((1,), float(len(seen))))], len(seen))
    return seen


IN_ORDER = [max(0, update - LAG) for update in range(UPDATES)]


@pytest.mark.parametrize("slow", [True, False], ids=["slower than the trainer", "faster"])
@pytest.mark.parametrize("store", [CountingShared, CountingGpu])
def test_a_generator_process_has_at_most_two_versions_in_its_store_at_lag_64(tmp_path, store, slow):
    generator = Threaded(tmp_path, store(), slow)
    assert train(generator) == IN_ORDER
    assert generator.store.largest == 2 if slow else generator.store.largest <= 2
    generator.close()


def test_a_generator_that_keeps_up_has_one_version_in_its_store_at_lag_64(tmp_path):
    generator = Threaded(tmp_path, CountingShared(), slow=False)
    assert train(generator, keeps_up=True) == IN_ORDER
    assert generator.store.largest == 1
    generator.close()


def test_a_generator_with_in_flight_updates_has_at_most_four_versions_in_its_store_at_lag_64(tmp_path):
    generator = Threaded(tmp_path, CountingShared(), slow=True, in_flight=True)
    seen = train(generator)
    assert all(update - LAG <= version <= update for update, version in enumerate(seen))
    assert generator.store.largest <= 4
    generator.close()


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_have_at_most_two_versions_each_in_their_store_at_lag_64(tmp_path, count, monkeypatch):
    monkeypatch.setattr("rlhf.generators.process.SharedWeights", CountingShared)
    generator = Replicas(lambda i, store: ThreadedReplica(tmp_path, store, slow=True), count, in_flight=False)
    assert train(generator) == IN_ORDER
    assert count < generator.store.largest <= 2 * count
    generator.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_trainer_that_waits_to_send_weights_gets_the_error_of_the_generator(tmp_path, replicas):
    def one(i, store):
        return ThreadedReplica(tmp_path, store, slow=True, fails=6)

    generator = one(0, SharedWeights()) if replicas == 1 else Replicas(one, replicas, in_flight=False)
    with pytest.raises(RunError, match="out of ideas"):
        train(generator)
    generator.close()


def test_a_generator_in_the_trainers_process_copies_no_weights_at_lag_64():
    def unread():
        raise AssertionError("the weights must not be copied")
        yield

    model = tiny_lm()
    generator = HFGenerator(
        lambda: nullcontext(model), HFSettings(stop_ids=[3], pad_id=0, batch_size=8, seed=1)
    )
    sampling = Sampling(samples=1, temperature=1.0, response_length=2, purpose="train")
    stream = Stream(context(generator, itertools.repeat(prompts()), sampling, LAG, 66))
    generator.load(unread(), 0)
    for update, rollouts in enumerate(stream, start=1):
        assert rollouts.version == max(0, update - 1 - LAG)
        assert all(future.done() for future in stream.pending), "no request waits for weights"
        generator.load(unread(), update)


@pytest.mark.parametrize(
    ("words", "processes"),
    [("", 1), ("generator.replicas=3", 3), ("schedule.update=in_flight", 1), ("generator=vllm", 1)],
)
def test_the_memory_plan_at_lag_64_has_the_largest_number_of_kept_versions(words, processes):
    cfg = compose(["schedule.max_lag=64", *words.split()])
    (part,) = (part for use in plan(cfg).uses for part in use.parts if part.name == "weights in transfer")
    assert part.made_of.startswith(f"{most_versions(processes, cfg.schedule.in_flight)} versions")
