"""`generator=auto`: vLLM where it is installed and a GPU is available, else Hugging Face."""

import importlib.util

import pytest

from rlhf.checks.sizes import describe
from rlhf.config import best_generator
from rlhf.config.compose import compose
from rlhf.config.identity import run_name
from rlhf.core.machine import Machine


@pytest.mark.parametrize(
    ("gpus", "ranks", "installed", "expected"),
    [
        (0, 1, True, "hf"),
        (2, 1, False, "hf"),
        (1, 1, True, "vllm_colocated"),
        (2, 1, True, "vllm"),
        (4, 4, True, "vllm_colocated"),
        (8, 7, True, "vllm"),
    ],
)
def test_auto_is_the_same_as_the_option_that_it_selects(gpus, ranks, installed, expected, monkeypatch):
    monkeypatch.setattr(best_generator, "this_machine", lambda: Machine(2**36, (2**36,) * gpus))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name if installed or name != "vllm" else "no_such")
    )
    chosen, named = (compose([f"generator={name}"]) for name in ("auto", expected))
    assert chosen == named and run_name(chosen) == run_name(named)
    assert (("generator", expected) in describe(chosen)) == expected.startswith("vllm")
