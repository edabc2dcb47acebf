"""The generators that `generator=auto` may select on a machine."""

import importlib.util
import os

import pytest

from rlhf.config import root
from rlhf.config.root import SELECTED, candidates, selecting
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
