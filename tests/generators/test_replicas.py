"""Tests of replicas: they answer requests in turn and use the same weight versions as a single generator."""

import itertools
import os
import signal
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch

from rlhf.core.batch import Sampling
from rlhf.core.errors import RunError
from rlhf.generators.process import Replica, Replicas
from rlhf.processes.worker import environment
from rlhf.training.stream import Stream
from tests.processes.test_worker import LIMITS, SECONDS, Fake, answers, ask, files_of, gone, load, prompts
from tests.training.streams import context

pytestmark = [pytest.mark.process, pytest.mark.forks]

WEIGHTS = [("weight", torch.ones(1))]


@dataclass
class Answered:
    """Rollouts of a replica without a process."""

    version: int
    trainer_version: int = 0
    behaviour_logprobs: None = None

    def __len__(self) -> int:
        return 0


class Noted(Replica):
    """A replica without a process that records the jobs it has done.

    Args:
        store: the store of the weights.
        waits: do the jobs when the test calls `work`; by default at once.
    """

    def __init__(self, store, waits=False):
        self.store, self.waits = store, waits
        self.done, self.queue, self.confirmed = [], [], None

    @property
    def unanswered(self):
        return len(self.queue)

    def put(self, job):
        self.queue.append(job)
        if not self.waits:
            self.work()
        return job.future

    def work(self):
        while self.queue:
            job = self.queue.pop(0)
            if job.method == "load":
                before, (self.confirmed,) = self.confirmed, job.arguments
                if before is not None:
                    self.store.release(before)
                self.done.append(("load", self.confirmed.version))
            else:
                self.done.append((job.arguments[1].purpose, job.arguments[1].request))
                job.future.set_result(Answered(self.confirmed.version))

    def close(self):
        self.done.append("close")


def noted(count, in_flight=False, waits=False):
    return Replicas(lambda i, store: Noted(store, waits), count, in_flight)


def sampling(request=0, purpose="train"):
    return Sampling(samples=1, temperature=1.0, response_length=2, purpose=purpose, request=request)


def train(generator, lag, updates, first=0):
    """Load and request as the training loop does; return the version that answered each request."""
    stream = Stream(
        context(generator, itertools.repeat(prompts()), sampling(), lag, first + updates, update=first)
    )
    generator.load(WEIGHTS, first)
    seen = []
    for rollouts in stream:
        seen.append(rollouts.version)
        generator.load(WEIGHTS, first + len(seen))
    return seen


@pytest.mark.parametrize(("count", "lag"), [(2, 1), (2, 2), (3, 2), (3, 5), (4, 7)])
def test_request_t_goes_to_replica_t_mod_n_and_is_sampled_by_version_t_minus_lag(count, lag):
    generator = noted(count)
    assert train(generator, lag, updates=12) == [max(0, t - lag) for t in range(12)]
    for i, replica in enumerate(generator.replicas):
        expected, held = [], None
        for t in range(i, 12, count):
            if (version := max(0, t - lag)) != held:
                expected.append(("load", held := version))
            expected.append(("train", t))
        assert replica.done == expected, "a replica loads only the versions that its requests need"
    resumed = noted(count)
    train(resumed, lag, updates=count, first=7)
    assert {(7 + i) % count: ("train", 7 + i) for i in range(count)} == {
        i: replica.done[1] for i, replica in enumerate(resumed.replicas)
    }
    at_once = noted(count, in_flight=True)
    for version in range(3):
        at_once.load(WEIGHTS, version)
    assert [replica.done for replica in at_once.replicas] == [[("load", v) for v in range(3)]] * count


def test_an_evaluation_goes_to_the_replica_with_the_shortest_queue():
    generator = noted(3, waits=True)
    generator.load(WEIGHTS, 0)
    for request in (0, 1):
        generator.submit(prompts(), sampling(request))
    generator.load(WEIGHTS, 1)
    generator.submit(prompts(), sampling(5, "eval"))
    generator.replicas[2].work()
    assert generator.replicas[2].done == [("load", 1), ("eval", 5)], (
        "an evaluation uses the weights of the last load"
    )
    generator.submit(prompts(), sampling(5, "eval"))
    assert len(generator.replicas[2].queue) == 1, "the replica has loaded these weights already"


@pytest.mark.parametrize(("count", "lag"), [(2, 2), (3, 5), (2, 64)])
def test_replicas_share_a_snapshot_whose_file_is_reused_after_its_release(count, lag):
    generator = noted(count)
    train(generator, lag, updates=lag + 20)
    store = generator.store
    assert len(files_of(store)) <= 2 * count
    held = {replica.confirmed.path for replica in generator.replicas} | {generator.latest.path}
    assert set(files_of(store)) == held | set(store.free) and not held & set(store.free)
    first = noted(count)
    first.load(WEIGHTS, 0)
    for request in range(count):
        first.submit(prompts(), sampling(request))
    assert len(files_of(first.store)) == 1, "all replicas read the same copy"


def test_shared_memory_is_freed_after_all_processes_have_ended():
    generator = noted(2)
    generator.load(WEIGHTS, 0)
    close, ended = generator.store.close, []
    generator.store.close = lambda: (
        ended.append([replica.done[-1:] for replica in generator.replicas]),
        close(),
    )
    generator.close()
    assert ended == [[["close"], ["close"]]] and not files_of(generator.store)


@pytest.mark.parametrize(
    ("visible", "gpus", "given"),
    [
        ("", 1, [None] * 4),
        ("", 2, ["1"] * 4),
        ("", 4, ["3", "2", "1", "3"]),
        ("5,7,6", 3, ["6", "7", "6", "7"]),
    ],
)
def test_replicas_leave_the_first_gpu_to_the_trainer(monkeypatch, visible, gpus, given):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = [environment(1, torch.device("cuda"), replica) for replica in range(4)]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in made] == given


@pytest.fixture
def start(tmp_path):
    """Return a function that starts replicas in worker processes; the fixture closes the replicas."""
    made = []

    def make(count, factory):
        def replica(i, store):
            log = tmp_path / f"generator-replica{i}.log"
            return Replica(factory, log, {"OMP_NUM_THREADS": "1"}, LIMITS, False, store)

        made.append(Replicas(replica, count, in_flight=False))
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def test_a_lost_replica_is_restarted_and_the_others_continue(start, tmp_path):
    generator = start(2, Fake("dies", at=2, once=tmp_path))
    load(generator, 0)
    futures = [ask(generator, 0, "train"), ask(generator, 1), ask(generator, 2)]
    load(generator, 1)
    futures += [ask(generator, 3)]
    load(generator, 2)
    load(generator, 3)
    futures += [ask(generator, 4), ask(generator, 5)]
    assert answers(futures) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 3), (3, 3, 4), (3, 3, 5)]
    assert [replica.restarts for replica in generator.replicas] == [1, 0]
    figures = generator.figures()
    assert figures["generator/restarts"].value() == 1 and figures["time/load_s"].value() > 0
    assert generator.figures()["generator/restarts"].value() == 0, "each restart is reported once"
    os.kill(generator.replicas[0].process.pid, signal.SIGKILL)  # while it is idle
    load(generator, 4)
    assert answers([ask(generator, 6), ask(generator, 7)]) == [(4, 4, 6), (4, 4, 7)]
    found = [replica.process.pid for replica in generator.replicas]
    assert len(set(found)) == 2
    generator.close()
    assert all(map(gone, found)) and not files_of(generator.store)


def test_a_failed_replica_stops_the_run_when_its_answer_is_awaited(start, tmp_path):
    generator = start(2, Fake("raises", at=1))
    load(generator, 0)
    futures = [ask(generator, 0), ask(generator, 1)]
    assert answers(futures[:1]) == [(0, 0, 0)]
    with pytest.raises(RunError, match=r"out of ideas; the traceback is in generator-replica1\.log"):
        futures[1].result(SECONDS)
    assert "out of ideas" in (tmp_path / "generator-replica1.log").read_text()
    with pytest.raises(RunError, match="out of ideas"):
        ask(generator, 3)
    assert isinstance(ask(generator, 2), Future)
