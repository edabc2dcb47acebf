"""Tests of PPO: rewards of tokens, states with a value, the value loss and the KL coefficient."""

from dataclasses import replace

import pytest
import torch

from rlhf.config.algorithms import KLEstimator, KLIn, PPOConfig
from rlhf.core.batch import Outputs
from rlhf.objectives.ppo import PPO
from tests.objectives.test_policy_gradient import batch_of, draw

PLAIN = {"kl_coef": 0.0, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}


def credited(batch, **settings):
    objective = PPO(PPOConfig(**{**PLAIN, **settings}))
    return objective, objective.credit(batch)


def test_the_score_rewards_the_end_state_or_the_last_token_of_a_response_of_full_length():
    values = torch.zeros(1, 2, 4)
    _, batch = credited(batch_of([[5.0, 7.0]], lengths=[[2, 3]], values=values), lam=0.0)
    # if lambda and all values are 0, the return of a state is its reward
    assert batch.returns.tolist() == [[[0, 0, 5, 0], [0, 0, 7, 0]]]
    assert batch.value_mask.tolist() == [[[True, True, True, False], [True, True, True, False]]]


def test_without_an_end_state_the_score_rewards_the_last_token():
    values = torch.zeros(1, 2, 4)
    _, batch = credited(batch_of([[5.0, 7.0]], [[2, 3]], values=values), lam=0.0, end_state=False)
    assert batch.returns.tolist() == [[[0, 5, 0, 0], [0, 0, 7, 0]]]
    assert batch.value_mask.sum(-1).tolist() == [[2, 3]]


def test_with_lambda_1_advantages_are_the_score_minus_the_value():
    batch = batch_of([[5.0, 7.0]], lengths=[[2, 3]])
    _, done = credited(batch)
    expected = (torch.tensor([[[5.0], [7.0]]]) - batch.values[..., :-1]) * batch.response_mask
    torch.testing.assert_close(done.advantages, expected)
    torch.testing.assert_close(done.returns, torch.tensor([[[5.0], [7.0]]]) * done.value_mask)


def test_each_token_is_penalised_by_its_own_kl():
    ref = torch.tensor([[[-2.0, -1.0, -3.0]]])  # KL of the tokens: 1, 0, 2
    values = torch.zeros(1, 1, 4)
    _, batch = credited(batch_of([[5.0]], ref_logprobs=ref, values=values), kl_coef=0.5, lam=0.0)
    assert batch.advantages.tolist() == [[[-0.5, 0.0, 5 - 1.0]]]


def test_values_after_the_end_of_a_response_have_no_effect():
    batch = batch_of([[5.0, 7.0]], lengths=[[1, 2]])
    _, done = credited(batch, lam=0.95)
    _, same = credited(replace(batch, values=torch.where(done.value_mask, batch.values, 99.0)), lam=0.95)
    assert torch.equal(done.advantages, same.advantages) and torch.equal(done.returns, same.returns)


def test_advantages_are_whitened_over_response_tokens_and_returns_are_not():
    objective, batch = credited(batch_of([[5.0, 7.0], [1.0, 3.0]], [[2, 3], [1, 3]]), whiten_advantages=True)
    white = batch.advantages[batch.response_mask]
    assert white.mean().item() == pytest.approx(0, abs=1e-6) and white.std().item() == pytest.approx(1)
    assert not batch.advantages[~batch.response_mask].any()
    assert batch.returns.max() == 7


def test_whitened_rewards_keep_their_mean():
    values = torch.zeros(2, 1, 4)
    _, batch = credited(batch_of([[6.0], [12.0]], [[3], [3]], values=values), lam=0.0, whiten_rewards=True)
    rewards = batch.returns[batch.value_mask]  # if lambda and all values are 0, returns are rewards
    assert rewards.mean().item() == pytest.approx(3) and rewards.std().item() == pytest.approx(1)


def value_step(values, batch, **settings):
    objective = PPO(PPOConfig(**settings))
    values = values.clone().requires_grad_()
    outputs = Outputs(logprobs=batch.behaviour_logprobs.clone().requires_grad_(), values=values)
    sums, figures = objective.loss(lambda _: outputs, batch)
    (gradient,) = torch.autograd.grad(sums["value"], values)
    return sums["value"].item(), gradient, figures


@pytest.mark.parametrize("moved", [0.0, 0.25], ids=["within", "at"])
def test_the_value_loss_is_half_the_squared_error_over_states(moved):
    _, batch = credited(batch_of([[5.0, 7.0]], lengths=[[2, 3]]))
    loss, gradient, _ = value_step(batch.values + moved, batch, clip_value=0.25)
    error = (batch.values + moved - batch.returns) * batch.value_mask
    assert loss == pytest.approx(0.5 * error.square().sum().item())
    torch.testing.assert_close(gradient, error)
    assert PPO(PPOConfig()).count(batch)["value"] == 6


def test_a_value_beyond_the_clip_range_has_no_gradient():
    _, batch = credited(batch_of([[5.0]]))
    loss, gradient, figures = value_step(batch.values + 0.5, batch, clip_value=0.2)  # towards the return
    near = (batch.values + 0.2 - batch.returns)[batch.value_mask]
    assert loss == pytest.approx(0.5 * near.square().sum().item(), rel=1e-5)
    assert not gradient.any()
    assert figures["value/clipfrac"].value() == 1
    away, gradient, _ = value_step(batch.values - 0.5, batch, clip_value=0.2)
    assert gradient[batch.value_mask].all(), "a value that moves away from the return is not clipped"


def test_an_adaptive_kl_coefficient_moves_towards_its_target_and_is_saved():
    objective = PPO(PPOConfig(kl_coef=0.1, kl_target=1.0, kl_horizon=100))
    far = batch_of(draw(4, 5), ref_logprobs=torch.full((4, 5, 3), -3.0))  # KL of a response: 6
    objective.credit(far)
    assert objective.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 20 / 100))
    assert objective.describe(far)["objective/kl_coef"].value() == objective.kl_coef
    again = PPO(PPOConfig(kl_coef=0.1, kl_target=1.0))
    again.load_state_dict(objective.state_dict())
    assert again.kl_coef == objective.kl_coef
    near = batch_of(draw(4, 5))  # KL 0
    before = objective.kl_coef
    objective.credit(near)
    assert objective.kl_coef == pytest.approx(before * (1 - 0.2 * 20 / 100))


def test_an_adaptive_kl_coefficient_also_applies_in_the_loss():
    settings = {"kl_coef": 0.1, "kl_in": KLIn.loss, "kl_horizon": 10, "whiten_advantages": False}
    losses = []
    for target in (None, 1.0):
        objective = PPO(PPOConfig(kl_target=target, **settings))
        batch = objective.credit(batch_of([[0.0]], ref_logprobs=torch.full((1, 1, 3), -3.0)))
        batch.advantages = torch.zeros(1, 1, 3)
        losses.append(objective.policy_loss(Outputs(logprobs=batch.behaviour_logprobs), batch)[0].item())
    assert losses[1] == pytest.approx(losses[0] * (1 + 0.2 / 10))


def test_a_fixed_kl_coefficient_does_not_change():
    objective, _ = credited(batch_of([[1.0]], ref_logprobs=torch.full((1, 1, 3), -3.0)), kl_coef=0.1)
    assert objective.kl_coef == 0.1


def test_k3_in_the_reward_never_increases_the_reward():
    ref = torch.tensor([[[-0.5, -1.0, -3.0]]])  # the first token is likelier under the reference
    values = torch.zeros(1, 1, 4)
    batch = batch_of([[0.0]], ref_logprobs=ref, values=values)
    _, k1 = credited(batch, kl_coef=1.0, lam=0.0)
    _, k3 = credited(batch, kl_coef=1.0, lam=0.0, kl_estimator=KLEstimator.k3)
    assert k1.advantages[0, 0, 0] > 0 and (k3.advantages <= 0).all()
