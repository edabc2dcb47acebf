"""Tests of the weights of preference pairs in the losses of DPO."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.config.algorithms import DPOConfig, DPOLoss, PairWeighting
from rlhf.core.batch import Outputs
from rlhf.objectives.dpo import OnlineDPO, pair_weights
from tests.objectives.test_objectives import batch_of

IS, WPO = PairWeighting["is"], PairWeighting.wpo
LOSSES = [
    {"loss_type": DPOLoss.sigmoid, "label_smoothing": 0.1},
    {"loss_type": DPOLoss.ipo},
    {"loss_type": DPOLoss.hinge},
    {"loss_type": DPOLoss.robust, "label_smoothing": 0.1},
]
N = 5


def pairs(drift=0.3, lengths=None):
    """Return log-probs [N, 2, 2] of the policy with log sum p^2, and pairs of an older policy."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(N, 2, 2) if lengths is None else (torch.arange(2) < torch.tensor(lengths)[..., None])
    now = -torch.rand(N, 2, 2, generator=draw) * mask
    squares = -torch.rand(N, 2, 2, generator=draw) * mask
    sampled = now + drift * torch.randn(N, 2, 2, generator=draw) * mask
    ref = now + 0.3 * torch.randn(N, 2, 2, generator=draw) * mask
    return now, squares, batch_of([[1, 0]] * N, sampled, ref, lengths)


def gradient(logprobs, squares, batch, **settings):
    """Return loss and gradient of every pair [N, 2, 2] with a loss that is the sum over the pairs."""
    logprobs = logprobs.clone().requires_grad_()
    outputs = Outputs(logprobs=logprobs, log_sum_squares=squares)
    sums, figures = OnlineDPO(DPOConfig(**settings)).loss(lambda _: outputs, batch)
    sums["policy"].backward()
    return sums["policy"].item(), logprobs.grad, figures


@pytest.mark.parametrize("weighting", [IS, WPO])
@pytest.mark.parametrize("loss", LOSSES, ids=[loss["loss_type"].value for loss in LOSSES])
def test_the_gradient_of_a_pair_is_its_weight_times_the_unweighted_gradient(loss, weighting):
    logprobs, squares, batch = pairs()
    _, plain, _ = gradient(logprobs, squares, batch, **loss)
    _, weighted, _ = gradient(logprobs, squares, batch, weighting=weighting, **loss)
    config = DPOConfig(weighting=weighting)
    weights, _ = pair_weights(Outputs(logprobs=logprobs, log_sum_squares=squares), batch, config)
    assert plain.any() and weights.min() < 0.9 and len(weights.unique()) > 2
    torch.testing.assert_close(weighted, weights[:, None, None] * plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", LOSSES, ids=[loss["loss_type"].value for loss in LOSSES])
def test_importance_weights_of_on_policy_pairs_change_no_bit_of_loss_and_gradient(loss):
    logprobs, squares, batch = pairs(drift=0)
    plain, expected, _ = gradient(logprobs, squares, batch, **loss)
    weighted, found, figures = gradient(logprobs, squares, batch, weighting=IS, **loss)
    assert weighted == plain and torch.equal(found, expected)
    assert {name: figures[f"weighting/{name}"].value() for name in ("mean", "truncated", "ess")} == {
        "mean": 1.0,
        "truncated": 0.0,
        "ess": 1.0,
    }


def test_an_importance_weight_is_the_truncated_ratio_of_both_responses():
    now = torch.tensor([[[-1.0, -1.0], [-2.0, 0.0]]])
    for lag, expected in (((-0.5, -0.25), math.exp(-0.75)), ((0.5, 0.25), math.exp(0.6))):
        sampled = now - torch.tensor(lag)[None, :, None] * torch.tensor([1.0, 0.0])
        config = DPOConfig(weighting=IS, weighting_eps=0.3)
        weights, figures = pair_weights(Outputs(logprobs=now), batch_of([[1, 0]], sampled), config)
        assert weights.tolist() == pytest.approx([expected])
        assert figures["weighting/truncated"].value() == (sum(lag) > 0.6)


def test_a_wpo_weight_is_the_product_of_mean_probabilities_over_real_tokens():
    now = torch.tensor([[[-1.0, -3.0], [-2.0, 0.0]]])
    squares = torch.tensor([[[-0.5, -0.5], [-1.5, 0.0]]])
    batch = batch_of([[1, 0]], lengths=[[2, 1]])
    weights, _ = pair_weights(Outputs(now, log_sum_squares=squares), batch, DPOConfig(weighting=WPO))
    assert weights.tolist() == pytest.approx([math.exp((-0.5 - 2.5) / 2 - 0.5)])


def test_the_bound_of_wpo_weights_is_the_clamp_or_none():
    now, squares = torch.zeros(1, 2, 2), torch.full((1, 2, 2), -1.0)  # v = e for both responses
    expected = {1.0: (1.0, 1), 2.0: (2.0, 1), 10.0: (math.exp(2), 0), None: (math.exp(2), 0)}
    for clamp, (weight, truncated) in expected.items():
        config = DPOConfig(weighting=WPO, weighting_clamp=clamp)
        weights, figures = pair_weights(Outputs(now, log_sum_squares=squares), batch_of([[1, 0]]), config)
        assert weights.tolist() == pytest.approx([weight])
        assert figures["weighting/truncated"].value() == truncated


def test_wpo_asks_for_the_sum_of_squares_and_needs_no_sampler():
    assert "log_sum_squares" in OnlineDPO(DPOConfig(weighting=WPO)).needs
    assert "log_sum_squares" not in OnlineDPO(DPOConfig(weighting=IS)).needs | OnlineDPO(DPOConfig()).needs
    now, squares, batch = pairs()
    loss, _, _ = gradient(now, squares, replace(batch, behaviour_logprobs=None), weighting=WPO)
    assert math.isfinite(loss)


@pytest.mark.parametrize("weighting", [IS, WPO])
def test_weights_of_empty_responses_and_of_extreme_log_probs_are_finite(weighting):
    now, squares, batch = pairs(lengths=[[0, 2]] * N)
    config = DPOConfig(weighting=weighting, weighting_eps=100, weighting_clamp=None)
    for size in (1, 1e4, -1e4):
        outputs = Outputs(logprobs=now + size * batch.response_mask, log_sum_squares=squares)
        weights, _ = pair_weights(outputs, batch, config)
        assert weights.isfinite().all() and weights.square().isfinite().all()


def test_a_weight_equal_to_its_bound_is_not_truncated():
    now, _, batch = pairs(drift=0)
    weights, figures = pair_weights(Outputs(now), batch, DPOConfig(weighting=IS, weighting_eps=0))
    assert weights.tolist() == [1] * N and figures["weighting/truncated"].value() == 0
