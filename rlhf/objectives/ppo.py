"""PPO with a value model and generalised advantage estimation.

Schulman et al., arXiv 1707.06347 and 1506.02438; for language models: Ziegler et al., arXiv 1909.08593;
details after Huang et al., arXiv 2403.17031.

    r_t = -beta k_t, and the score at the end      k: the KL of `algo.kl_estimator`, where `algo.kl_in=reward`
    d_t = r_t + gamma V_t+1 - V_t;  A_t = d_t + gamma lambda A_t+1;  R_t = A_t + V_t
    policy:  mean over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)),  A whitened over the rollout batch
    value:   0.5 mean over states of max((V - R)^2, (clip(V, V_old +- clip_value) - R)^2), times vf_coef

The state after the last token is a step of its own, which gets the score, in a response shorter than allowed
(`algo.end_state`, as in the original); else the last token gets it. The coefficient of the KL is fixed, or
moves towards `algo.kl_target` (Ziegler et al., section 2.2). Needs: a value model, reference log-probs; any
K. No signal: never quite; the value model learns from every score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.core.metrics import Stat, mean
from rlhf.objectives.advantages import gae, whiten
from rlhf.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from rlhf.config.algo import PPOConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics
    from rlhf.objectives.objective import Counts, Forward, Losses


class PPO(PolicyGradient):
    """Actor and critic."""

    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.needs |= {"values"}
        self.loss_weights = {"value": config.vf_coef}
        if config.kl_target is not None:
            self.needs |= {"old_logprobs"}

    def describe(self, batch: Batch) -> Metrics:
        """The same, and the coefficient of the KL, which may move."""
        return {**super().describe(batch), "objective/kl_coef": Stat(self.kl_coef)}

    def credit(self, batch: Batch) -> Batch:
        """Advantages [N, K, T] and returns [N, K, T+1]."""
        assert batch.values is not None
        states = self.states(batch.response_mask)
        rewards = torch.zeros_like(batch.values)
        kl = self.kl(batch)
        if self.kl_in_reward:
            rewards[..., :-1] = -self.kl_coef * kl
        end = states.sum(-1, keepdim=True) - 1
        rewards.scatter_add_(-1, end, self.scores(batch)[:, :, None])
        if self.config.whiten_rewards:
            rewards = whiten(rewards, states, shift=False)
        values = batch.values * states
        advantages = gae(rewards, values, self.config.gamma, self.config.lam)
        returns = (advantages + values) * states
        advantages = advantages[..., :-1]
        if self.config.whiten_advantages:
            advantages = whiten(advantages, batch.response_mask)
        self.adapt(float(kl.sum(-1).mean()), batch.episodes)
        return replace(
            batch,
            values=values,
            value_mask=states,
            returns=returns,
            advantages=advantages * batch.response_mask,
        )

    def states(self, mask: Tensor) -> Tensor:
        """The states [N, K, T+1] whose value is learned, from the response mask: those that a token follows,
        and the end.
        """
        if not self.config.end_state:
            return F.pad(mask, (0, 1))
        allowed = F.pad(torch.ones_like(mask), (0, 1))
        return F.pad(mask, (1, 0), value=True) & allowed

    def adapt(self, kl: float, episodes: int) -> None:
        """Move the coefficient of the KL towards its target, by the KL of a response in this batch."""
        if self.config.kl_target is not None:
            error = min(max(kl / self.config.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * episodes / self.config.kl_horizon

    def advantages(self, rewards: Tensor) -> Tensor:
        """Not from rewards alone: see `credit`."""
        raise NotImplementedError

    def count(self, batch: Batch) -> Counts:
        """Response tokens, and states."""
        assert batch.value_mask is not None
        return {**super().count(batch), "value": float(batch.value_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """The sums of the policy's and the value model's loss."""
        out = forward(batch)
        assert out.logprobs is not None and out.values is not None
        policy, figures = self.policy_loss(out.logprobs, batch)
        value, more = self.value_loss(out.values, batch)
        return {"policy": policy, "value": value}, {**figures, **more}

    def value_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """The sum of the value model's loss from its values [N, K, T+1], and figures."""
        assert batch.values is not None and batch.returns is not None and batch.value_mask is not None
        room = self.config.clip_value
        near = values.clamp(batch.values - room, batch.values + room)
        free, bound = (values - batch.returns).square(), (near - batch.returns).square()
        losses = 0.5 * torch.maximum(free, bound)
        return (losses * batch.value_mask).sum(), {
            "value/clipfrac": mean((bound > free).float(), batch.value_mask),
            "value/mean": mean(values, batch.value_mask),
            "value/returns": mean(batch.returns, batch.value_mask),
        }

    def state_dict(self) -> dict[str, float]:
        """The coefficient of the KL."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Go on with the coefficient of the KL."""
        self.kl_coef = saved["kl_coef"]
