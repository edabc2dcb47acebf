"""Tests of the 16-bit copies of weights that autocast makes: their number, their gradients and their end."""

from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.config.algorithms import DPOConfig
from rlhf.config.models import Dtype
from rlhf.core.batch import Budget, Prompts, Sampling
from rlhf.engines import engine as engine_module
from rlhf.engines.engine import FrozenEngine
from rlhf.generators.hf.generator import HFGenerator, HFSettings
from rlhf.models.forward import checkpoint_blocks
from rlhf.models.modules import Policy
from rlhf.objectives.dpo import OnlineDPO
from rlhf.processes.ranks import ALONE
from tests.engines.test_engine import engine_of, gradient, scored, weights
from tests.tiny_models import tiny_lm, tiny_rollouts, tiny_tokenizer

DPO = OnlineDPO(DPOConfig())


class Casts(TorchDispatchMode):
    """A dispatch mode that counts casts of whole weights to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten._to_copy and kwargs.get("dtype") is torch.bfloat16:
            self.count += isinstance(args[0], torch.nn.Parameter)
        return func(*args, **(kwargs or {}))


def linear_weights(model):
    """Return the number of weights and biases in linear layers of the blocks; the head casts its tiles."""
    layers = [part for part in model.base_model.modules() if isinstance(part, torch.nn.Linear)]
    return sum(1 + (layer.bias is not None) for layer in layers)


def annotated(engine):
    return DPO.credit(engine.annotate(scored(), DPO.needs))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_casts_each_weight_once_for_all_micro_batches(checkpointing):
    engine = engine_of(micro_batch=4, dtype=Dtype.bfloat16)  # 4 micro-batches
    if checkpointing:
        checkpoint_blocks(engine.module.model)
    batch = annotated(engine)
    with Casts() as casts:
        engine.step(batch, DPO)
    assert casts.count == linear_weights(engine.module.model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_copies_do_not_change_a_bit_of_two_steps(checkpointing, monkeypatch):
    def trained(share):
        with monkeypatch.context() as patched:
            if not share:
                patched.setattr(engine_module, "shared_copies", lambda *_: nullcontext())
            engine = engine_of(micro_batch=4, dtype=Dtype.bfloat16)
            if checkpointing:
                checkpoint_blocks(engine.module.model)
            batch = annotated(engine)
            losses = [engine.step(batch, DPO)["loss/policy"].value() for _ in range(2)]
        return losses, weights(engine), gradient(engine)

    (losses, *tensors), (expected, *others) = trained(True), trained(False)
    assert losses == expected and losses[0] != losses[1]
    for found, other in zip(tensors, others, strict=True):
        assert torch.equal(found, other)


def test_a_step_uses_the_weights_of_the_step_before():
    engine = engine_of(micro_batch=4, dtype=Dtype.bfloat16)
    batch = annotated(engine)
    engine.step(batch, DPO)
    fresh = engine_of(micro_batch=4, dtype=Dtype.bfloat16)
    fresh.module.load_state_dict(engine.module.state_dict())
    assert engine.step(batch, DPO)["loss/policy"].value() == fresh.step(batch, DPO)["loss/policy"].value()


class LooksFirst(OnlineDPO):
    """An objective that runs each micro-batch without gradients before it computes the loss."""

    def loss(self, forward, batch):
        with torch.no_grad():
            forward(batch)
        return super().loss(forward, batch)


def test_a_forward_without_gradients_inside_a_step_does_not_remove_gradients():
    found, expected = (engine_of(micro_batch=4, dtype=Dtype.bfloat16) for _ in range(2))
    found.step(annotated(found), LooksFirst(DPOConfig()))
    expected.step(annotated(expected), DPO)
    assert torch.equal(weights(found), weights(expected))


def test_a_failed_step_leaves_no_copies():
    engine = engine_of(micro_batch=4, dtype=Dtype.bfloat16)
    batch = annotated(engine)
    with pytest.raises(ZeroDivisionError):
        engine.step(batch, Failing(DPOConfig()))
    with Casts() as casts:
        engine.infer(engine.policy, batch, "logprobs")
    assert casts.count == linear_weights(engine.module.model)


class Failing(OnlineDPO):
    """An objective whose loss fails after the forward."""

    def loss(self, forward, batch):
        forward(batch)
        raise ZeroDivisionError


def frozen():
    policy = Policy(tiny_lm(), 0.7, shared_prefix=True)
    return FrozenEngine(
        policy, None, tiny_tokenizer(), inference=Budget(4), ranks=ALONE, dtype=Dtype.bfloat16
    )


def test_a_frozen_engine_casts_each_weight_once_per_annotation():
    engine = frozen()
    with Casts() as casts:
        engine.infer(engine.policy, scored(), "logprobs")
    assert casts.count == linear_weights(engine.module.model)


def test_a_frozen_engine_casts_each_weight_once_per_request_to_sample():
    engine = frozen()
    sampling = Sampling(samples=2, temperature=1.0, response_length=4, purpose="train")
    ends = engine.tokenizer
    settings = HFSettings(stop_ids=[ends.eos_token_id], pad_id=ends.pad_token_id, batch_size=4, seed=0)
    generator = HFGenerator(engine.borrow_policy, settings)
    rollouts = tiny_rollouts()
    prompts = Prompts(**{each.name: getattr(rollouts, each.name) for each in fields(Prompts)})
    with Casts() as casts:
        generator.submit(prompts, sampling).result()
    head = 1  # sampling casts the head as a layer
    assert casts.count == linear_weights(engine.module.model) + head
