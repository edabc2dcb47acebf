"""Tests of servers that get their weights by NCCL, with a socket in place of NCCL and with fake servers."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from rlhf.core.errors import RunError
from rlhf.generators.servers.process import LOAD
from rlhf.generators.weights import fingerprint
from tests.generators.fake_server import FakeServer
from tests.generators.test_gpu_transfer import OverSocket
from tests.generators.test_server_pool import (  # noqa: F401
    LIMIT_S,
    Started,
    error_of,
    loop,
    play,
    quick,
    wait_until,
    weights,
)


def sum_of(tensor: torch.Tensor) -> int:
    """Return the checksum that the trainer sends for a tensor."""
    return int(fingerprint(tensor)) % 2**64


@pytest.mark.parametrize("children", [True, False], ids=["started", "anywhere"])
def test_each_server_gets_all_versions_in_a_group_of_its_own(children, loop, tmp_path):  # noqa: F811
    with Started(loop, tmp_path, count=2, children=children, store=(store := OverSocket())) as two:
        play(two.pool, sum_of=sum_of)
        assert [fake.groups for fake in two.fakes] == [1, 1]
        assert two.figures() == (0, 0) and len(store.senders) == 2
        wait_until(lambda: store.kept == 1)
    wait_until(lambda: not any(sender.is_alive() for sender in store.senders))
    assert store.kept == 0


def hangs(fake: FakeServer) -> None:
    time.sleep(2 * LIMIT_S)


def dies(fake: FakeServer) -> None:
    asyncio.run_coroutine_threadsafe(fake.dies(), fake.loop).result(10)


@pytest.mark.parametrize("children", [True, False], ids=["started", "anywhere"])
@pytest.mark.parametrize("fault", [hangs, dies])
@pytest.mark.parametrize("notices", [True, False])
def test_a_server_that_is_lost_in_a_transfer_joins_a_new_group(fault, notices, children, loop, tmp_path):  # noqa: F811
    """Whether or not the sender notices, the limit of the load ends its wait."""
    store = OverSocket(notices=notices)
    with Started(loop, tmp_path, children=children, limit_s=LIMIT_S, store=store) as one:
        one.fakes[0].transfers = [None, None, fault]
        play(one.pool, sum_of=sum_of)
        assert one.figures()[0] >= 1 and one.fakes[0].groups >= 2
        lost, *_ = store.senders
        wait_until(lambda: not lost.is_alive())


def test_what_cannot_be_sent_is_named(loop, tmp_path):  # noqa: F811
    with Started(loop, tmp_path, restarts=0, limit_s=LIMIT_S, store=OverSocket(fails=0)) as one:
        one.pool.load(weights(0), 0)
        error = error_of(one.pool)
        assert isinstance(error, RunError) and "by NCCL, got OutOfMemoryError: no room to pack" in str(error)
        assert one.fakes[0].calls[LOAD] == 1
