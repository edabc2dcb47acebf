"""The memory of the optimizer in the plan, compared with the state of real optimizers."""

import importlib.util

import pytest
import torch

from rlhf.config.schedule import OptimConfig, Optimizer
from rlhf.engines.engine import build_optimizer, hidden_matrices
from rlhf.memory import plan as memory
from rlhf.memory.sizes import config_size, matrix_parameters
from rlhf.memory.trainer import EIGHT_BIT
from rlhf.models.modules import Policy
from rlhf.words.compose import compose
from tests.memory.test_plan import COUNT_2_8B, PYTHIA_2_8B, TWO_GPUS, laptop, parts, phases, pythia
from tests.tiny_models import KINDS, tiny_config, tiny_lm

__all__ = ["laptop", "pythia"]  # fixtures
MATRICES = 32 * 12 * 2560**2  # of Pythia 2.8b


def state_bytes(name: str, module: Policy) -> int:
    """Return the bytes of the state of a real optimizer after one step, without step counts and tables."""
    optimizer = build_optimizer(module, OptimConfig(optimizer=Optimizer(name), lr=1e-3), None)
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    found = [value for state in optimizer.state.values() for key, value in state.items() if "map" not in key]
    tensors = [each for each in found if isinstance(each, torch.Tensor) and each.dim()]
    return sum(each.numel() * each.element_size() for each in tensors)


def optimizer_bytes(*words: str) -> float:
    return parts(memory.plan(compose(words), TWO_GPUS).uses[0])["policy: optimizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_muon_updates_the_counted_matrices(kind):
    module, size = Policy(tiny_lm(kind), 0.7, True), config_size(tiny_config(kind).to_dict())
    assert sum(each.numel() for each in hidden_matrices(module)) == matrix_parameters(size)


def test_muon_has_one_float32_momentum_per_element_of_a_matrix(pythia):
    planned = optimizer_bytes(*pythia, "optim.optimizer=muon")
    assert planned == pytest.approx(4 * MATRICES + 8 * (COUNT_2_8B - MATRICES))
    module = Policy(tiny_lm(), 0.7, True)
    every, matrices = (
        sum(each.numel() for each in found) for found in (module.parameters(), hidden_matrices(module))
    )
    assert state_bytes("muon", module) == 4 * matrices + 8 * (every - matrices)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_8_bit_moments_have_two_bytes_per_parameter_and_the_scales_of_blocks():
    module = Policy(tiny_lm(hidden_size=64, vocab_size=256), 0.7, True)
    small = sum(each.numel() for each in module.parameters() if each.numel() < 4096)
    large = sum(each.numel() for each in module.parameters()) - small
    assert state_bytes("adamw_8bit", module) == EIGHT_BIT * large + 8 * small


def test_a_step_with_8_bit_moments_has_no_temporary_tensors(pythia):
    assert optimizer_bytes(*pythia, "optim.optimizer=adamw_8bit") == EIGHT_BIT * COUNT_2_8B
    use = memory.plan(compose([*pythia, "optim.optimizer=adamw_8bit"]), TWO_GPUS).uses[0]
    assert phases(use)["optimizer step"].parts[-1].bytes == 0


def test_a_step_of_muon_needs_temporary_tensors_for_one_matrix(pythia):
    use = memory.plan(compose([*pythia, "optim.optimizer=muon"]), TWO_GPUS).uses[0]
    largest = PYTHIA_2_8B["hidden_size"] * PYTHIA_2_8B["intermediate_size"]
    assert phases(use)["optimizer step"].parts[-1].bytes == 4 * (COUNT_2_8B - MATRICES) + 10 * largest


def test_muon_counts_adapters_as_matrices(pythia):
    words = [*pythia, "model.lora.rank=16"]
    assert optimizer_bytes(*words, "optim.optimizer=muon") == optimizer_bytes(*words) / 2
