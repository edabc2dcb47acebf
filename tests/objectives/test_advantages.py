"""Tests of advantages against values computed by hand."""

import math

import pytest
import torch

from rlhf.config.algorithms import KLEstimator, Scale
from rlhf.objectives.advantages import centred, decoupled, gae, leave_one_out, scaled, whiten
from rlhf.objectives.policy_gradient import kl_estimate


def test_leave_one_out_compares_with_the_mean_of_the_others():
    found = leave_one_out(torch.tensor([[6.0, 3.0, 0.0, 3.0]]))
    torch.testing.assert_close(found, torch.tensor([[4.0, 0.0, -4.0, 0.0]]))


def test_rewards_are_scaled_by_the_deviation_of_the_group_or_the_batch_or_not_scaled():
    rewards = torch.tensor([[1.0, 3.0], [0.0, 10.0]])
    plain, group, batch = (
        scaled(centred(rewards), rewards, scale) for scale in (Scale.none, Scale.group, Scale.batch)
    )
    torch.testing.assert_close(plain, torch.tensor([[-1.0, 1.0], [-5.0, 5.0]]))
    deviation = math.sqrt(2) + 1e-4
    torch.testing.assert_close(group[0], torch.tensor([-1 / deviation, 1 / deviation]))
    torch.testing.assert_close(batch[1] * (rewards.std() + 1e-4), torch.tensor([-5.0, 5.0]))


@pytest.mark.parametrize("samples", [2, 3, 7])
def test_a_tied_group_has_advantage_exactly_0(samples):
    rewards = torch.full((1, samples), 0.3)  # for some K, the mean in float32 is not 0.3
    assert not leave_one_out(rewards).any()
    assert not any(scaled(centred(rewards), rewards, scale).any() for scale in Scale)


def test_gae_with_lambda_1_is_returns_minus_values():
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 3, 5, generator=draw), torch.rand(2, 3, 5, generator=draw)
    gamma = 0.9
    returns = torch.stack(
        [sum(gamma ** (s - t) * rewards[..., s] for s in range(t, 5)) for t in range(5)], dim=-1
    )
    found = gae(rewards, values, gamma, lam=1.0, states=torch.ones(2, 3, 5, dtype=torch.bool))
    torch.testing.assert_close(found, returns - values)


def test_gae_with_lambda_0_is_the_one_step_error():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    found = gae(rewards, values, gamma=0.5, lam=0.0, states=torch.ones(1, 3, dtype=torch.bool))
    assert found.tolist() == [[1 + 10 - 10, 2 + 15 - 20, 3 - 30]]


def test_decoupled_advantages_use_only_the_responses_that_a_part_judges():
    nan, weights = math.nan, {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([1.0, 1.0])}
    a = torch.tensor([[1.0, 3.0, nan], [nan, nan, nan]])
    b = torch.tensor([[0.1, 0.1, 0.1], [0.3, nan, 0.3]])  # no part distinguishes the samples of prompt 2
    found = decoupled({"a": a, "b": b}, weights)
    total = torch.tensor([[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]) / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(found, total / (total.std() + 1e-4))
    assert not found[1].any() and found[0, 2] == 0, "exactly 0: they have no signal"


def test_whitening_ignores_padding():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x = torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]])
    other = torch.where(mask, x, 1e6)
    white = whiten(x, mask)
    assert torch.equal(white, whiten(other, mask))
    assert not white[~mask].any()
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask].std().item() == pytest.approx(1, abs=1e-6)


def test_whitening_without_shift_keeps_the_mean():
    mask = torch.ones(1, 4, dtype=torch.bool)
    white = whiten(torch.tensor([[1.0, 2.0, 3.0, 6.0]]), mask, shift=False)
    assert white.mean().item() == pytest.approx(3)
    assert white.std().item() == pytest.approx(1)


def test_k1_is_the_log_ratio_and_k3_is_never_negative():
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.0, -1.0])
    assert kl_estimate(logprobs, ref, KLEstimator.k1).tolist() == [1, 0, -2]
    expected = [math.exp(-1) - 1 + 1, 0, math.exp(2) - 1 - 2]
    assert kl_estimate(logprobs, ref, KLEstimator.k3).tolist() == pytest.approx(expected)


def test_both_estimators_average_to_the_kl():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    kl = (policy * (policy / reference).log()).sum()
    for estimator in KLEstimator:
        found = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
        torch.testing.assert_close(found, kl)
