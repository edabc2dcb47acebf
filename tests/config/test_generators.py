"""Generators: what `generator=auto` may select, and what a run checks of its servers."""

import importlib.util
import os
import socket

import pytest

from rlhf.config import root
from rlhf.config.generators import INTERFACE, Transfer, VLLMServerConfig
from rlhf.config.root import SELECTED, candidates, selecting
from rlhf.core import machine
from rlhf.core.machine import Machine
from rlhf.words.compose import compose


@pytest.mark.parametrize(
    ("gpus", "ranks", "installed", "expected"),
    [
        (0, 1, True, ("hf",)),
        (2, 1, False, ("hf",)),
        (1, 1, True, ("vllm_colocated", "hf")),
        (2, 1, True, ("vllm", "hf")),
        (4, 4, True, ("hf",)),
        (8, 7, True, ("vllm", "hf")),
    ],
)
def test_vllm_is_a_candidate_with_a_gpu_and_has_its_own_if_there_are_more_gpus_than_ranks(
    gpus, ranks, installed, expected, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name if installed or name != "vllm" else "no_such")
    )
    assert candidates(gpus, ranks) == expected
    monkeypatch.setattr(root, "this_machine", lambda: Machine(2**36, (2**36,) * gpus))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert candidates() == expected


def test_a_selection_ends_with_its_block(monkeypatch):
    monkeypatch.delenv(SELECTED, raising=False)
    with selecting("vllm"):
        with selecting("vllm_colocated"):
            assert compose(["generator=auto"]).generator.name == "vllm_colocated"
        assert compose(["generator=auto"]).generator.name == "vllm"
    assert SELECTED not in os.environ
    assert compose(["generator=auto"]).generator.name == "hf"


@pytest.mark.parametrize(
    ("host", "interface", "told"), [("127.0.0.1", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", "eth0", 0)]
)
@pytest.mark.parametrize("transfer", [Transfer.nccl, Transfer.auto])
def test_weights_by_nccl_from_other_hosts_need_the_interface(host, interface, told, transfer, monkeypatch):
    """Where this is missing, NCCL would use the loopback interface, and wait."""
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setattr(machine, "_CONNECT_S", 0.1)  # the server answers nothing
    if interface:
        monkeypatch.setenv(INTERFACE, interface)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://{host}:{server.getsockname()[1]}"
        found = list(VLLMServerConfig(urls=[url], transfer=transfer).job_problems("generator"))
    assert len(found) == (told if transfer is Transfer.nccl else 0)
    assert all(text.endswith(f"run: export {INTERFACE}=<interface>") for text in found)
