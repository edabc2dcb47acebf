"""PPO with a value model and generalised advantage estimation.

Schulman et al., arXiv 1707.06347 and 1506.02438; for language models: Ziegler et al., arXiv 1909.08593;
details after Huang et al., arXiv 2403.17031.

    r_t = -beta k_t, plus the score at the end      k: KL estimate of a token, only with `algo.kl_in=reward`
    d_t = r_t + gamma V_t+1 - V_t;  A_t = d_t + gamma lambda A_t+1;  R_t = A_t + V_t
    policy:  mean over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)),  A whitened over the rollout batch
    value:   0.5 mean over states of max((V - R)^2, (clip(V, V_old +- clip_value) - R)^2), times vf_coef

u is the ratio of each token. With `algo.end_state=true` (default, as in Noukhovitch et al., arXiv
2410.18252), the state after the last token is a separate step, which receives the score. In two cases there
is no separate step, and the last token receives the score: if a response has the full allowed length, and
with `algo.end_state=false`. beta is fixed, or adapts until the KL is near `algo.kl_target` (Ziegler et al.,
section 2.2).

In an episode, messages of an environment are no states: no reward, no decay, no value is learned there.

Needs: a value model, reference log-probs; any K. Prompts without signal (see `rlhf.objectives.objective`):
none, because the value model learns from every score.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.config.algorithms import PPOConfig
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, Stat, mean, selected
from rlhf.objectives.advantages import gae, whiten
from rlhf.objectives.objective import Counts, Forward, Losses
from rlhf.objectives.policy_gradient import PolicyGradient


class PPO(PolicyGradient):
    """The PPO objective: a clipped policy gradient and a value loss, for an `ActorCritic`."""

    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.needs |= {"values"}
        self.loss_weights = {"value": config.vf_coef}

    @property
    def credits_kl(self) -> bool:
        """Return True if the rewards contain the KL, or the KL coefficient adapts to it."""
        return self.kl_in_reward or self.config.kl_target is not None

    def describe(self, batch: Batch) -> Metrics:
        """Return the `objective/` metrics of an annotated batch and the current KL coefficient."""
        return {**super().describe(batch), "objective/kl_coef": Stat(self.kl_coef)}

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages [N, K, T], returns and value mask [N, K, T+1].

        The KL coefficient adapts once per call, after the rewards are computed.
        """
        assert batch.values is not None
        states = self.states(batch)
        kl = self.kl(batch)
        rewards = self.token_rewards(kl, self.scores(batch), states)
        if self.config.whiten_rewards:
            rewards = whiten(rewards, states, shift=False)
        values = selected(batch.values, states)
        advantages = gae(rewards, values, self.config.gamma, self.config.lam, states)
        returns = selected(advantages + values, states)
        advantages = advantages[..., :-1]
        if self.config.whiten_advantages:
            advantages = whiten(advantages, batch.response_mask)
        self.adapt(float(kl.sum(-1).mean()), batch.episodes)
        advantages = selected(advantages, batch.response_mask)
        batch = replace(batch, values=values, value_mask=states, returns=returns, advantages=advantages)
        return replace(self.coupled(batch), signal=None)  # the value model learns from rejected tokens, too

    def states(self, batch: Batch) -> Tensor:
        """Return which states have a learned value, [N, K, T+1] bool.

        These are the states before each token of the model and, with `algo.end_state`, the state after the
        last token of a response that is shorter than the allowed length.
        """
        states = F.pad(batch.response_mask, (0, 1))
        if self.config.end_state:
            real = batch.real
            after = F.pad(real, (1, 0), value=True) & ~F.pad(real, (0, 1))  # the state after the last token
            states = states | (after & F.pad(torch.ones_like(real), (0, 1)))
        return states

    def adapt(self, kl: float, episodes: int) -> None:
        """Change the KL coefficient to move the KL towards `algo.kl_target`; null: do nothing.

        Args:
            kl: mean KL of a response in this batch.
            episodes: responses in this batch.
        """
        if self.config.kl_target is not None:
            error = min(max(kl / self.config.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * episodes / self.config.kl_horizon

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens and the number of states with a learned value."""
        assert batch.value_mask is not None
        return {**super().count(batch), "value": float(batch.value_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sums of the policy loss and the value loss over a micro-batch, and metrics."""
        out = forward(batch)
        assert out.values is not None
        policy, policy_metrics = self.policy_loss(out, batch)
        value, value_metrics = self.value_loss(out.values, batch)
        return {"policy": policy, "value": value}, {**policy_metrics, **value_metrics}

    def value_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the summed value loss and metrics, given values [N, K, T+1] of the value model."""
        assert batch.values is not None and batch.returns is not None and batch.value_mask is not None
        clip, values = self.config.clip_value, selected(values, batch.value_mask)
        clipped = values.clamp(batch.values - clip, batch.values + clip)
        free, bound = (values - batch.returns).square(), (clipped - batch.returns).square()
        losses = 0.5 * torch.where(bound > free, bound, free)
        return selected(losses, batch.value_mask).sum(), {
            "value/clipfrac": mean((bound > free).float(), batch.value_mask),
            "value/mean": mean(values, batch.value_mask),
            "value/returns": mean(batch.returns, batch.value_mask),
        }

    def state_dict(self) -> dict[str, float]:
        """Return the KL coefficient."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Restore the KL coefficient."""
        self.kl_coef = saved["kl_coef"]
