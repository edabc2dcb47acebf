"""Memory of messages between ranks: buffers of NCCL, and gradients that are summed."""

import pytest

from rlhf.core.machine import Machine
from rlhf.memory import plan as memory
from rlhf.memory.uses import GIB, GROUP
from rlhf.processes.ranks import BUCKET
from rlhf.words.compose import compose
from tests.memory.test_plan import COUNT_2_8B, TWO_GPUS, parts, phases, pythia

__all__ = ["pythia"]
FOUR_GPUS = Machine(ram=256 * GIB, gpus=(80 * GIB,) * 4)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def nccl(*words: str) -> list[float]:
    """Return the buffers of NCCL on each device."""
    return [parts(use).get("NCCL", 0) for use in memory.plan(compose(list(words)), FOUR_GPUS).uses]


def test_one_rank_that_sends_no_weights_has_no_buffers_of_nccl(pythia):
    assert nccl(*pythia) == [0, 0]


def test_several_ranks_on_gpus_have_the_buffers_of_one_group(pythia, two_ranks):
    assert nccl(*pythia) == [GROUP, 0]
    assert 0.5 * GIB < GROUP < 0.7 * GIB


def test_weights_sent_by_nccl_need_a_group_on_both_sides(pythia):
    vllm = [*pythia, "generator=vllm"]
    assert nccl(*vllm) == [GROUP, GROUP, 0]
    assert nccl(*vllm, "generator.transfer=shared_memory") == [0, 0, 0]
    assert nccl(*vllm, "generator.replicas=2") == [0, 0, 0], "replicas read one snapshot in shared memory"
    assert nccl(*pythia, "generator=vllm_colocated") == [0, 0, 0]
    assert nccl(*vllm, "generator.tensor_parallel_size=2") == [2 * GROUP, GROUP, 0]


def test_ranks_without_gpus_have_no_buffers_of_nccl(two_ranks):
    (use,) = memory.plan(compose([]), Machine(ram=16 * GIB)).uses
    assert "NCCL" not in parts(use)


def bucket(*words: str) -> float:
    use = memory.plan(compose(list(words)), TWO_GPUS).uses[0]
    return {part.name: part.bytes for part in phases(use)["training"].parts}.get("gradient bucket", 0)


def test_ranks_sum_gradients_in_two_copies_of_a_bucket(pythia, two_ranks):
    assert COUNT_2_8B > BUCKET
    assert bucket(*pythia) == 2 * 4 * BUCKET
    assert bucket(*pythia, "backend=zero2") == 2 * 4 * 50_000_000, "DeepSpeed's reduce_bucket_size"
    adapters = 32 * 1 * ((2560 + 3 * 2560) + 2 * 2560 + 2 * (2560 + 10240))
    assert bucket(*pythia, "model.lora.rank=1") == 2 * 4 * adapters < 2 * 4 * BUCKET


def test_one_rank_sums_no_gradients(pythia):
    assert bucket(*pythia) == 0
