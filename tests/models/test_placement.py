"""Linear weights that are stored transposed in memory: values, results, saving and resuming."""

import pytest
import torch
from torch import nn

from rlhf.config.algorithms import DPOConfig
from rlhf.models.forward import place
from rlhf.models.loading import load_causal_lm, save
from rlhf.models.modules import Policy
from rlhf.objectives.dpo import OnlineDPO
from tests.engines.test_engine import engine_of, scored
from tests.tiny_models import KINDS, tiny_lm, tiny_rollouts, tiny_tokenizer

CPU = torch.device("cpu")


def narrowing(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features > m.out_features]


@pytest.mark.parametrize("kind", KINDS)
def test_only_weights_with_more_inputs_than_outputs_are_stored_transposed(kind):
    model, plain = place(tiny_lm(kind), CPU), tiny_lm(kind)
    assert narrowing(model) and all(layer.weight.t().is_contiguous() for layer in narrowing(model))
    turned = {id(layer.weight) for layer in narrowing(model)}
    assert all(p.is_contiguous() for p in model.parameters() if id(p) not in turned)
    for (name, found), (same, expected) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == same and torch.equal(found, expected)
    found, expected = (Policy(m, 0.7, True)(tiny_rollouts()).logprobs for m in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_model_with_transposed_weights_is_saved_with_contiguous_weights(tmp_path):
    model = place(tiny_lm(), CPU)
    save(model, tiny_tokenizer(), tmp_path)
    loaded = load_causal_lm(str(tmp_path))
    assert all(p.is_contiguous() for p in loaded.parameters())
    for found, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_optimizer_moments_saved_with_another_memory_layout_are_loaded_correctly(tmp_path):
    one, other, objective = engine_of(), engine_of(), OnlineDPO(DPOConfig())
    batch = objective.credit(one.annotate(scored(), objective.needs))
    one.tokenizer = other.tokenizer = tiny_tokenizer()
    one.step(batch, objective)
    one.save(tmp_path)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert any(not m["exp_avg"].is_contiguous() for m in state["optimizer"]["state"].values())
    for moments in state["optimizer"]["state"].values():
        moments.update({name: value.contiguous() for name, value in moments.items()})
    torch.save(state, tmp_path / "optimizer.pt")
    other.load(tmp_path)
    for engine in (one, other):
        engine.step(batch, objective)
    for found, expected in zip(other.module.parameters(), one.module.parameters(), strict=True):
        assert torch.equal(found, expected)
