"""Tests of the GPUs that worker processes use."""

import pytest
import torch

from rlhf.core.machine import worker_gpu
from rlhf.processes.worker import environment


@pytest.mark.parametrize(
    ("gpus", "ranks", "reserved", "given"),
    [
        (1, 1, [], [0, 0]),
        (2, 1, [], [1, 1]),
        (4, 1, [], [3, 2]),
        (4, 2, [], [3, 2]),
        (4, 3, [], [3, 3]),
        (4, 4, [], [0, 1]),  # no other GPU: each worker process shares the GPU of its rank
        (4, 1, [1, 2], [3, 3]),
        (2, 1, [1], [0, 0]),
        (1, 4, [], [0, 0]),  # each rank sees one GPU
    ],
)
def test_worker_processes_use_the_gpus_after_those_of_the_ranks(gpus, ranks, reserved, given):
    own = [number if ranks == 4 else 0 for number in range(2)]  # rank of the process that starts the worker
    assert [worker_gpu(i, gpus, ranks, own[i], reserved) for i in range(2)] == given


def test_the_environment_of_a_worker_process_names_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cuda = torch.device("cuda", 1)
    for device, number, reserved, given in (
        (cuda, 0, [], "7"),
        (cuda, 1, [], "6"),
        (cuda, 1, [3], "6"),
        (cuda, 0, [2, 3], "5"),  # the GPU of the rank
        (torch.device("cpu"), 0, [], None),
    ):
        assert environment(1, device, number, reserved).get("CUDA_VISIBLE_DEVICES") == given
