"""Tests of ranks: waits that are longer than the time limit of a collective, and the errors of lost ranks."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.core.batch import Prompts, Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.generators.generator import PerRankGenerator, SharedGenerator
from rlhf.processes.ranks import Ranks, lost_rank

TIMEOUT_S = 2.0  # time limit of a collective
LATE_S = 2.5  # seconds for which a rank keeps the other rank waiting
SECONDS = 120  # time limit of a process
PROGRAM = "import sys; from tests.processes import test_ranks; test_ranks.wait_for_each_other(*sys.argv[1:])"


class Late:
    """A generator that takes a while to answer and to be ready for new weights."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.pool = ThreadPoolExecutor()

    def submit(self, prompts, sampling):
        return self.pool.submit(self.sample, prompts)

    def sample(self, prompts):
        time.sleep(self.seconds)
        tokens = prompts.prompt_ids[:, None]
        return prompts.extend(
            Rollouts,
            response_ids=tokens,
            response_mask=tokens > -1,
            ended=torch.ones(len(prompts), 1, dtype=torch.bool),
        )

    def wait(self):
        time.sleep(self.seconds)


def wait_for_each_other(folder, rank):
    """Be one of two ranks that keep each other waiting; write the results to <folder>/<rank>.json."""
    folder, rank = Path(folder), int(rank)
    (folder / f"{rank}.imported").touch()
    while len(list(folder.glob("*.imported"))) < 2:
        time.sleep(0.05)
    ranks = Ranks.join(torch.device("cpu"), TIMEOUT_S)
    ids = torch.arange(4)[:, None]
    prompts = Prompts(
        index=ids[:, 0], texts=[""] * 4, references=[""] * 4, prompt_ids=ids, prompt_mask=ids > -1
    )

    def fail():
        time.sleep(LATE_S)
        raise UserError("no such model")

    try:
        ranks.from_first(fail)
    except UserError as error:
        told = str(error)
    shared = SharedGenerator(Late(LATE_S) if ranks.first else None, ranks)
    of_first = shared.submit(prompts, None).result().response_ids.flatten().tolist()
    shared.wait()
    own = PerRankGenerator(Late(LATE_S * rank), ranks)
    of_all = own.submit(prompts, None).result().response_ids.flatten().tolist()
    own.wait()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    (folder / f"{rank}.json").write_text(json.dumps([told, of_first, of_all, interface]))


@pytest.mark.process
@pytest.mark.forks
def test_ranks_wait_for_a_busy_rank_longer_than_the_time_limit_of_a_collective(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(rank)],
            env={**inherited, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(SECONDS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        told, of_first, of_all, interface = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == "error: no such model"
        assert of_first == of_all == [0, 1, 2, 3]
        assert interface.startswith("lo"), "ranks of one host communicate through the loopback interface"


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo/pair.cc:537] reset by peer"), dist.DistError("timeout")]
)
def test_a_failed_collective_of_a_library_is_reported_as_a_lost_rank(error):
    explanation = lost_rank(error)
    assert isinstance(explanation, RunError)
    assert str(explanation).startswith("the connection between the ranks failed")


def test_other_errors_of_libraries_are_not_reported_as_a_lost_rank():
    assert lost_rank(RuntimeError("out of memory")) is None
