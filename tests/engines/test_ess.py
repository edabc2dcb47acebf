"""Tests of the learning rate that is scaled by the effective sample size of a step (VCPO)."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.config.algorithms import DPOConfig, GRPOConfig
from rlhf.config.models import Dtype
from rlhf.config.run import ESSScaling, LRSchedule
from rlhf.core.batch import Batch
from rlhf.engines.engine import TorchEngine
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.grpo import GRPO
from tests.engines import test_engine
from tests.engines.test_engine import weights
from tests.tiny_models import tiny_rollouts

LR = 1e-3


def engine_of(micro_batch=16, dtype=Dtype.float32, **optim) -> TorchEngine:
    return test_engine.engine_of(
        micro_batch, dtype=dtype, optim={"lr": LR, "schedule": LRSchedule.constant, **optim}
    )


def batch_of(noise=0.3, prompts=6, samples=4) -> Batch:
    """Return a batch whose sampler differs from `engine_of()` by noise in each log-prob."""
    rollouts = tiny_rollouts(prompts, samples)
    draw = torch.Generator().manual_seed(3)
    engine = engine_of()
    now = engine.infer(engine.policy, rollouts, "logprobs")
    sampler = (now + noise * torch.randn(now.shape, generator=draw)) * rollouts.response_mask
    scores = torch.rand(prompts, samples, generator=draw)
    return replace(rollouts, behaviour_logprobs=sampler).extend(Batch, scores=scores, ref_logprobs=now)


def step(engine, batch, objective=None):
    objective = objective or GRPO(GRPOConfig(kl_coef=0.0))
    figures = engine.step(objective.credit(batch), objective)
    return {name: stat.value() for name, stat in figures.items()}


def share_of(batch: Batch) -> float:
    """Return the effective sample size over the number of responses, from the definition."""
    assert batch.ref_logprobs is not None and batch.behaviour_logprobs is not None
    weights = (batch.ref_logprobs - batch.behaviour_logprobs).double().sum(-1).exp().flatten()
    return float(weights.sum() ** 2 / weights.square().sum() / len(weights))


@pytest.mark.parametrize("micro_batch", [4, 8, 24])
def test_the_rate_of_a_step_is_scaled_by_the_root_of_its_effective_sample_size(micro_batch):
    batch = batch_of()
    share = share_of(batch)
    assert share < 0.8
    engine = engine_of(micro_batch, ess_scaling=ESSScaling.sqrt)
    figures = step(engine, batch)
    assert figures["mismatch/step_ess"] == pytest.approx(share, rel=1e-5)
    assert figures["policy/lr_scale"] == pytest.approx(math.sqrt(share), rel=1e-5)
    assert figures["lr"] == pytest.approx(LR * math.sqrt(share), rel=1e-5)
    assert engine.optimizer.param_groups[0]["lr"] == figures["lr"]


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"ess_scaling": ESSScaling.linear}, lambda share: share),
        ({"ess_scaling": ESSScaling.linear, "ess_on_policy": 0.9}, lambda share: share / 0.9),
        ({"ess_scaling": ESSScaling.sqrt, "ess_on_policy": 0.9}, lambda share: math.sqrt(share / 0.9)),
        ({"ess_scaling": ESSScaling.sqrt, "ess_on_policy": 0.1}, lambda _: 1.0),
    ],
)
def test_the_scale_is_relative_to_the_on_policy_share_and_at_most_1(settings, scale):
    batch = batch_of()
    assert step(engine_of(**settings), batch)["policy/lr_scale"] == pytest.approx(scale(share_of(batch)))


def test_the_scale_uses_the_policy_of_the_step_not_the_policy_before_the_update():
    batch = batch_of(noise=0.0)
    old = replace(batch, old_logprobs=batch_of().behaviour_logprobs)
    figures = step(engine_of(ess_scaling=ESSScaling.sqrt), old)
    assert figures["policy/lr_scale"] == 1 > figures["mismatch/ess"]


def test_an_on_policy_step_is_exactly_the_step_without_scaling():
    batch = batch_of(noise=1e-6)  # rounding of the sampler
    plain, scaled = engine_of(), engine_of(ess_scaling=ESSScaling.sqrt)
    without, figures = step(plain, batch), step(scaled, batch)
    assert figures.pop("policy/lr_scale") == 1
    assert figures == without and torch.equal(weights(plain), weights(scaled))


def test_only_responses_that_are_trained_on_count():
    batch = batch_of()
    assert batch.scores is not None
    tied = replace(batch, scores=torch.cat([batch.scores[:2], torch.zeros(4, 4)]))
    seen = batch.select(torch.arange(2))
    figures = step(engine_of(ess_scaling=ESSScaling.linear), tied)
    assert figures["policy/lr_scale"] == pytest.approx(share_of(seen), rel=1e-5)
    pairs = OnlineDPO(DPOConfig())
    figures = step(engine_of(ess_scaling=ESSScaling.linear), batch, pairs)
    assert figures["policy/lr_scale"] == pytest.approx(share_of(pairs.credit(batch)), rel=1e-5)


def test_a_step_without_signal_keeps_the_scheduled_rate():
    engine = engine_of(ess_scaling=ESSScaling.sqrt)
    figures = step(engine, replace(batch_of(), scores=torch.zeros(6, 4)))
    assert figures["policy/skipped_steps"] == 1 and figures["lr"] == LR
    assert "policy/lr_scale" not in figures


def test_a_step_that_overflows_in_float16_is_skipped_with_scaling_too():
    engine = engine_of(dtype=Dtype.float16, ess_scaling=ESSScaling.sqrt)
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = weights(engine).clone()
    figures = step(engine, batch_of())
    assert figures["policy/overflows"] == 1 and 0 < figures["policy/lr_scale"] < 1
    assert torch.equal(weights(engine), before)


def test_weights_far_from_the_sampler_stay_finite():
    batch = batch_of()
    assert batch.behaviour_logprobs is not None
    far = batch.behaviour_logprobs.clone()
    far[0] -= 200
    figures = step(engine_of(ess_scaling=ESSScaling.sqrt), replace(batch, behaviour_logprobs=far))
    assert 0 < figures["policy/lr_scale"] < 1
    everywhere = replace(batch, behaviour_logprobs=torch.zeros_like(far) + 200)
    assert 0 < step(engine_of(ess_scaling=ESSScaling.sqrt), everywhere)["policy/lr_scale"] <= 1
