"""Tests of the environment variables that a worker process inherits from a rank."""

import os

import pytest
import torch.distributed as dist

from rlhf.processes.worker import Job, Limits, Service, Worker

pytestmark = [pytest.mark.process, pytest.mark.forks]

SECONDS = 120  # timeout of a wait

# What torchrun sets for a rank, except the variables that exist on one host with `--standalone` only.
OF_TORCHRUN = {
    **{"RANK": "3", "LOCAL_RANK": "3", "GROUP_RANK": "0", "ROLE_RANK": "3", "ROLE_NAME": "default"},
    **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
    **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
    **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
}


def lists(channel):
    """Return a service that lists its environment variables."""
    return Listing()


class Listing(Service):
    def variables(self):
        return dict(os.environ)

    def join_own_group(self):
        """Create a process group of one process, as vLLM does for its workers."""
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        port = store.port
        del store
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        return dist.get_world_size()


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Return a worker that a rank of torchrun starts."""
    for name, value in {**OF_TORCHRUN, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    limits = Limits(start_s=SECONDS, request_s=20, restarts=0)
    made = Worker("lister", lists, tmp_path / "lister.log", {"OMP_NUM_THREADS": "1"}, limits)
    yield made
    made.close()


def test_a_worker_process_inherits_no_variable_of_its_rank_and_creates_its_own_group(worker):
    found = worker.put(Job("variables")).result(SECONDS)
    assert not found.keys() & OF_TORCHRUN.keys()
    assert (found["HF_HUB_OFFLINE"], found["OMP_NUM_THREADS"]) == ("1", "1")
    assert os.environ["RANK"] == "3", "the environment of the rank is unchanged"
    assert worker.put(Job("join_own_group")).result(SECONDS) == 1
