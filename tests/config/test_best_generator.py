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
    monkeypatch.delenv(best_generator.OF_JOBS, raising=False)
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


def test_jobs_of_a_cluster_use_the_generator_that_the_sweep_chose_for_their_nodes(monkeypatch):
    monkeypatch.setenv(best_generator.OF_JOBS, "")  # monkeypatch restores it
    monkeypatch.delenv(best_generator.OF_JOBS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    best_generator.choose_for_jobs(gpus=8, ranks=8)  # on a login node without a GPU
    assert compose(["generator=auto"]).generator.name == "vllm_colocated"
    best_generator.choose_for_jobs(gpus=0, ranks=1)  # a job keeps the choice of the sweep
    assert best_generator.best_generator() == "vllm_colocated"
