"""Tests of vLLM on the trainer's GPU without a GPU: order of freeing and jobs, reloads, size of the cache.

A sampler with one weight replaces vLLM, and recorded calls replace the memory allocator of torch.
"""

import gc
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.generators import working_memory
from rlhf.core.errors import UserError
from rlhf.generators.vllm.generator import ColocatedGenerator, free_unused_memory
from rlhf.generators.vllm.sampler import LEAST_SHARE, on_shared_gpu
from rlhf.generators.weights import SharedWeights
from rlhf.processes.worker import Channel
from tests.end_to_end.conftest import wait_for
from tests.needs import VLLM
from tests.processes import test_worker
from tests.processes.test_worker import LIMITS, SECONDS, ask
from tests.tiny_models import tiny_config

GPU = torch.device("cuda", 0)
GIB = 2**30
FREE = ["collect", "synchronize cuda:0", "empty_cache"]


class Discards(test_worker.FakeSampler):
    """A sampler that discards its weight after each request, like vLLM with sleep level 2."""

    def sample(self, prompts, sampling, update=None):
        assert self.weight is not None, "the weight was discarded"
        rollouts = super().sample(prompts, sampling, update)
        self.weight = None
        return rollouts


@dataclass
class Fake(test_worker.Fake):
    def build(self):
        return Discards(self)


@pytest.fixture
def events(monkeypatch):
    """Record the calls of the memory allocator, and the messages to the process, in order."""
    found, send = [], Channel.send

    def sent(self, message):
        if isinstance(message, tuple) and isinstance(message[0], str):
            found.append(message[0])
        send(self, message)

    monkeypatch.setattr(gc, "collect", lambda: found.append("collect"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty_cache"))
    monkeypatch.setattr(Channel, "send", sent)
    return found


@pytest.fixture
def start(tmp_path, events):
    """Return a function that starts a colocated generator and waits until its process is ready."""
    made = []

    def make(fault="", at=0):
        store, log = SharedWeights(), tmp_path / "generator.log"
        fake = Fake(fault, at, once=tmp_path)
        made.append(ColocatedGenerator(GPU, fake, log, {"OMP_NUM_THREADS": "1"}, LIMITS, False, store))
        wait_for(lambda: not made[-1].unanswered)
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def load(generator, version):
    generator.load([("weight", torch.tensor(version))], version)
    wait_for(lambda: not generator.unanswered)


def answer(generator, request):
    return ask(generator, request).result(SECONDS).response_ids[0, 0].tolist()


@pytest.mark.process
@pytest.mark.forks
def test_the_trainer_frees_unused_gpu_memory_before_each_start_load_and_request(start, events):
    generator = start()
    load(generator, 0)
    assert answer(generator, 0) == [0, 0]
    load(generator, 1)
    assert answer(generator, 1) == [1, 1]
    one = [*FREE, "load", *FREE, "sample"]
    assert events == [*FREE, "build", *one, *one]


@pytest.mark.process
@pytest.mark.forks
def test_a_second_request_for_the_same_version_loads_the_weights_again(start, events):
    generator = start()
    load(generator, 0)
    assert [answer(generator, request) for request in (0, 1, 2)] == [[0, 0], [0, 1], [0, 2]]
    sent = [event for event in events if event not in FREE]
    assert sent == ["build", "load", "sample", "load", "sample", "load", "sample"]


@pytest.mark.process
@pytest.mark.forks
def test_a_process_lost_during_a_request_gets_the_weights_once_after_its_restart(start, events):
    generator = start("dies", at=1)
    load(generator, 0)
    assert [answer(generator, request) for request in (0, 1)] == [[0, 0], [0, 1]]
    assert generator.restarts == 1
    again = events.index("build", events.index("build") + 1)
    assert events[again - 3 : again] == FREE, "unused memory is freed before the restart"
    assert events[again:] == ["build", "load", "sample"]


def test_on_a_cpu_no_memory_is_freed(events):
    free_unused_memory(torch.device("cpu"))
    assert events == []
    free_unused_memory(GPU)
    assert events == FREE


def shared_gpu(monkeypatch, total, **changes):
    platform = SimpleNamespace(get_device_total_memory=lambda number: total)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    values = {"memory": 0.5, "max_model_len": 1000, "max_num_seqs": 64, "tensor_parallel_size": 1}
    settings = SimpleNamespace(dtype="bfloat16", **{**values, **changes})
    return on_shared_gpu(settings, tiny_config("llama"), parameters=GIB)


def test_the_cache_of_keys_and_values_has_the_share_without_weights_and_working_memory(monkeypatch):
    config = tiny_config("llama")
    working = working_memory(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        number_bytes=2,
        sequences=64,
    )
    found = shared_gpu(monkeypatch, 16 * GIB)
    assert found == {
        "kv_cache_memory_bytes": 6 * GIB - working,
        "gpu_memory_utilization": LEAST_SHARE,
        "max_num_batched_tokens": 8192,
    }
    two = shared_gpu(monkeypatch, 16 * GIB, tensor_parallel_size=2)
    assert two["kv_cache_memory_bytes"] == 7 * GIB - working
    assert shared_gpu(monkeypatch, 16 * GIB, max_num_seqs=9000)["max_num_batched_tokens"] == 9000


def test_a_share_without_room_for_one_sequence_is_rejected_with_a_share_that_suffices(monkeypatch):
    with pytest.raises(UserError, match=r"got 0\.2; set generator\.memory=0\.") as error:
        shared_gpu(monkeypatch, 16 * GIB, memory=0.2)
    enough = float(str(error.value).rpartition("=")[2])
    assert shared_gpu(monkeypatch, 16 * GIB, memory=enough)["kv_cache_memory_bytes"] > 0
    with pytest.raises(UserError, match="set model.policy to a smaller model"):
        shared_gpu(monkeypatch, 3 * GIB)


def test_working_memory_grows_with_sequences_and_the_model():
    sizes = {"hidden": 1024, "intermediate": 4096, "vocabulary": 50_000, "number_bytes": 2, "sequences": 256}
    base = working_memory(**sizes)
    assert 1.5 * GIB < base < 2.5 * GIB
    assert all(working_memory(**{**sizes, name: 2 * value}) > base for name, value in sizes.items())


def test_tensors_that_are_neither_parameters_nor_buffers_are_found():
    pytest.importorskip("vllm", reason=VLLM)
    from rlhf.generators.vllm.worker_extension import unregistered

    class Kernel:
        def __init__(self):
            self.slopes = torch.ones(4)

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[0].first_row = model[0].weight.detach()[0]  # a view of a parameter
    model[0].other = model[1]
    assert unregistered(model) == []
    model[1].kernels = [{"kernel": Kernel()}]
    model[1].scale = torch.ones(2, device="meta")
    (found,) = unregistered(model)
    assert found is model[1].kernels[0]["kernel"].slopes
