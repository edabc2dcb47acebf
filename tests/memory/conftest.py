"""Fixtures of the memory plan: a machine, a rank, and a large model."""

import pytest

from rlhf.core.machine import Machine
from rlhf.memory import plan
from tests.memory.plans import LAPTOP, PYTHIA_2_8B, local_model


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Let this run have one rank on a laptop without a GPU; `machine(other)` replaces the laptop."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def replace(other: Machine) -> None:
        monkeypatch.setattr(plan, "this_machine", lambda: other)

    replace(LAPTOP)
    return replace


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(n, local)` lets this run have n ranks, `local` of them (by default one) on this machine."""

    def start(count: int, local: int = 1) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))

    return start


@pytest.fixture
def pythia(tmp_path) -> list[str]:
    """Return overrides that set policy and reward model to a folder of Pythia 2.8b with empty weights."""
    folder = local_model(tmp_path / "pythia", PYTHIA_2_8B)
    return [f"model.policy={folder}", f"model.reward={folder}", "model.dtype=bfloat16"]
