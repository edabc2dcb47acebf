"""Tests of the outputs that only some objectives need: entropy and log of the sum of squares."""

from dataclasses import replace

import pytest
import torch

from rlhf.config.algorithms import DPOConfig, PairWeighting
from rlhf.models.logprobs import EXTRAS
from rlhf.models.modules import ActorCritic, Policy, ValueModel
from rlhf.objectives.dpo import OnlineDPO
from tests.engines.test_engine import engine_of, gradient, scored
from tests.models.test_lora import adapted
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_rollouts

MODULES = {
    "shared prefix": lambda: Policy(tiny_lm(), 0.7, shared_prefix=True),
    "apart": lambda: Policy(tiny_lm(), 0.7, shared_prefix=False),
    "adapters and a copy of the head": lambda: adapted(moved=False, modules_to_save=["lm_head"]),
    "value model": lambda: ActorCritic(
        Policy(tiny_lm(), 0.7, True), ValueModel(tiny_classifier(), shared_prefix=True)
    ),
}


class Asking(OnlineDPO):
    """Online DPO that asks for `extras` and records which of them the forward returns."""

    def __init__(self, *extras: str) -> None:
        super().__init__(DPOConfig())
        self.needs |= set(extras)
        self.seen: list[set[str]] = []

    def loss(self, forward, batch):
        outputs = forward(batch)
        self.seen.append({name for name in EXTRAS if getattr(outputs, name) is not None})
        return super().loss(lambda _: outputs, batch)


class Entropic(OnlineDPO):
    """Online DPO minus the entropy of the policy at every token."""

    def loss(self, forward, batch):
        outputs = forward(batch)
        losses, stats = super().loss(lambda _: outputs, batch)
        return {"policy": losses["policy"] - outputs.entropy.sum()}, stats


def distribution(policy: Policy, batch) -> torch.Tensor:
    """Return the log-probs [N, K, T, V] of the whole vocabulary, in float64."""
    logits = policy.model.get_output_embeddings()(policy.states(batch, last=False))
    return (logits.double() / policy.temperature).log_softmax(-1)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_extra_outputs_are_those_of_the_whole_distribution_and_zero_at_padding(module):
    module, batch = module(), tiny_rollouts()
    policy = module.actor if isinstance(module, ActorCritic) else module
    with torch.no_grad():
        found = module(batch, *EXTRAS)
        logps = distribution(policy, batch)
    entropy = -(logps.exp() * logps).sum(-1) * batch.response_mask
    squares = (2 * logps).logsumexp(-1) * batch.response_mask
    torch.testing.assert_close(found.entropy, entropy.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_sum_squares, squares.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.logprobs, module(batch).logprobs)
    assert (found.values is None) == (module is policy)


def test_the_gradient_of_the_entropy_reaches_every_weight():
    grads = []
    for extra in (True, False):
        policy, batch = Policy(tiny_lm(), 0.7, shared_prefix=True), tiny_rollouts()
        if extra:
            entropy = policy(batch, "entropy").entropy
        else:
            logps = distribution(policy, batch)
            entropy = -(logps.exp() * logps).sum(-1) * batch.response_mask
        entropy.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("extras", [(), ("entropy",), ("entropy", "log_sum_squares")])
def test_a_step_computes_the_extra_outputs_that_the_objective_needs_and_no_others(extras):
    engine, objective = engine_of(micro_batch=8), Asking(*extras)
    batch = objective.credit(engine.annotate(scored(), objective.needs))
    engine.step(batch, objective)
    assert objective.seen == [set(extras)] * 2


def test_annotation_computes_no_extra_outputs():
    objective, seen = Asking("entropy"), []
    engine = engine_of(steps_per_batch=2)
    engine.policy.register_forward_hook(lambda module, args, outputs: seen.append(outputs.entropy))
    engine.annotate(scored(), objective.needs | {"ratio"})
    assert seen == [None] * len(seen) and seen


def test_an_unused_entropy_does_not_change_the_gradient():
    found = []
    for objective in (Asking("entropy", "log_sum_squares"), Asking()):
        engine = engine_of()
        engine.step(objective.credit(engine.annotate(scored(), objective.needs)), objective)
        found.append(gradient(engine))
    assert torch.equal(*found)


def test_pairs_weighted_by_wpo_and_an_entropy_bonus_do_not_depend_on_the_micro_batch_size():
    objective = Entropic(DPOConfig(weighting=PairWeighting.wpo))
    objective.needs |= {"entropy"}
    found = []
    for size in (2, 16):
        engine = engine_of(micro_batch=size)
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        figures = engine.step(replace(batch, behaviour_logprobs=None), objective)
        assert figures["weighting/ess"].value() < 1
        found.append((figures["loss/policy"].value(), gradient(engine)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
