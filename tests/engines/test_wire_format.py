"""Tests of the weights that ZeRO-3 sends in bfloat16: the choice of weights, and exact gathering."""

from types import SimpleNamespace

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.engines.deepspeed_engine import exact, rounded_weights
from rlhf.models.forward import autocast
from rlhf.models.modules import ActorCritic, Policy, RewardModel, ValueModel
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_rollouts

CPU = torch.device("cpu")


def policy(kind="gpt_neox", float32_head=False, **settings):
    return Policy(tiny_lm(kind, **settings), 0.7, shared_prefix=True, float32_head=float32_head)


def test_weights_of_linear_layers_are_rounded_and_embeddings_norms_and_biases_are_not():
    module = policy()
    names = set(rounded_weights(module))
    assert "model.lm_head.weight" in names
    assert sum(name.endswith("dense.weight") for name in names) == 2
    others = dict(module.named_parameters()).keys() - names
    assert all(name.endswith(".bias") or "norm" in name or "embed_in" in name for name in others)


def test_a_weight_that_is_tied_to_the_embeddings_is_not_rounded():
    assert not any("lm_head" in name for name in rounded_weights(policy("llama", tie_word_embeddings=True)))
    assert any("lm_head" in name for name in rounded_weights(policy("llama", tie_word_embeddings=False)))


def test_heads_that_compute_in_float32_are_not_rounded():
    assert not any("lm_head" in name for name in rounded_weights(policy(float32_head=True)))
    value = ValueModel(tiny_classifier(), shared_prefix=True)
    names = set(rounded_weights(ActorCritic(policy(), value)))
    assert any(name.startswith("critic.") for name in names)
    assert not any("score" in name for name in names)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
@pytest.mark.parametrize("float32_head", [False, True])
def test_outputs_do_not_change_if_the_weights_are_stored_in_bfloat16(kind, float32_head):
    models = policy(kind, float32_head), RewardModel(tiny_classifier(kind), shared_prefix=True)
    for module, field in zip(models, ("logprobs", "rewards"), strict=True):
        with torch.no_grad(), autocast(CPU, Dtype.bfloat16):
            before = getattr(module(tiny_rollouts(3, 2)), field)
            for weight in rounded_weights(module).values():
                weight.data = weight.data.bfloat16()
            after = getattr(module(tiny_rollouts(3, 2)), field)
        assert torch.equal(before, after)


def divided(status: str) -> torch.nn.Parameter:
    """Return a parameter with the attributes that DeepSpeed sets."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.comm_dtype, parameter.ds_status = torch.bfloat16, SimpleNamespace(name=status)
    parameter.partition = lambda: setattr(parameter, "ds_status", SimpleNamespace(name="NOT_AVAILABLE"))
    return parameter


def test_weights_are_gathered_exactly_within_the_block_and_rounded_after_it():
    parameter, kept, other = divided("NOT_AVAILABLE"), divided("AVAILABLE"), torch.zeros(2)
    with pytest.raises(ZeroDivisionError), exact([parameter, kept, other, parameter]):
        assert not hasattr(parameter, "comm_dtype") and not hasattr(kept, "comm_dtype")
        assert kept.ds_status.name == "NOT_AVAILABLE", (
            "a weight that was gathered before must be gathered anew"
        )
        raise ZeroDivisionError
    assert parameter.comm_dtype == kept.comm_dtype == torch.bfloat16
    assert not hasattr(other, "comm_dtype")
