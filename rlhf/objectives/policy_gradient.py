"""What the policy-gradient objectives share: rewards, the ratio to the trainer before this update, clipping,
KL, correction.

    reward      r = score - beta sum_t k_t          the KL k of `algo.kl_estimator`, where `algo.kl_in=reward`
    ratio       u = exp(logp - old)                   `old` is the trainer just before this update
    surrogate   max(-A u, -A clip(u, 1 - low, 1 + high))
    loss        sum of correction * surrogate + beta u k    the last where `algo.kl_in=loss`

The factor u of k makes the gradient of the estimate that of the KL (DeepSeek-V3.2, arXiv 2512.02556, section
3.1); `algo.kl_unbiased=false` leaves it out.

An algorithm overrides what it does otherwise: `advantages`, `log_ratio`, `surrogate`, `reduce` and `count`.
Schulman et al., arXiv 1707.06347; `correction` is in `rlhf/objectives/correction.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.algo import KLIn
from rlhf.core.metrics import mean
from rlhf.objectives.advantages import kl_estimate
from rlhf.objectives.correction import importance_weights
from rlhf.objectives.objective import Objective, before, mismatch

if TYPE_CHECKING:
    from rlhf.config.algo import PolicyGradientConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics, Stat
    from rlhf.objectives.objective import Counts, Forward, Losses


class PolicyGradient(Objective):
    """Tokens are made likelier by their advantage."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        self.kl_coef = config.kl_coef
        self.needs = frozenset({"ref_logprobs", "ratio"})
        if self.kl_in_reward:
            self.needs |= {"old_logprobs"}

    @property
    def kl_in_reward(self) -> bool:
        """Whether credit subtracts the KL."""
        return self.config.kl_in is KLIn.reward and self.config.kl_coef > 0

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss adds the KL."""
        return self.config.kl_in is KLIn.loss and self.config.kl_coef > 0

    @property
    def spares_ties(self) -> bool:
        """Whether prompts without advantage are spared the forward; they have no gradient but the KL's."""
        return not self.kl_in_loss

    def credit(self, batch: Batch) -> Batch:
        """Advantages [N, K, T], one for all tokens of a response."""
        rewards = self.scores(batch)
        if self.kl_in_reward:
            rewards = rewards - self.kl_coef * self.kl(batch).sum(-1)
        advantages = self.advantages(rewards)
        return replace(
            batch,
            advantages=advantages[:, :, None] * batch.response_mask,
            signal=(advantages != 0).any(1) if self.spares_ties else None,
        )

    def scores(self, batch: Batch) -> Tensor:
        """The scores [N, K] as the algorithm sees them: normalised over the batch, then clipped, if asked."""
        scores = batch.scores
        if self.config.normalize_scores:
            scores = (scores - scores.mean()) / (scores.std() + 1e-8)
        if self.config.clip_scores is not None:
            scores = scores.clamp(-self.config.clip_scores, self.config.clip_scores)
        return scores

    def kl(self, batch: Batch) -> Tensor:
        """The estimated KL [N, K, T] of the trainer before this update to the reference, 0 at padding."""
        assert batch.ref_logprobs is not None
        return kl_estimate(before(batch), batch.ref_logprobs, self.config.kl_estimator) * batch.response_mask

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages [N, K] of responses from their rewards [N, K]."""

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """The logarithm of the ratio u, from `logp - old` [N, K, T] (0 at padding): here of each token."""
        return difference

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each token [N, K, T] before correction and KL, and where the ratio was clipped."""
        assert batch.advantages is not None
        ratio = log_ratio.exp()
        free = -batch.advantages * ratio
        bound = -batch.advantages * ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return torch.maximum(free, bound), bound > free

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """The sum of losses [N, K, T] that `count` divides: here every token counts alike."""
        return (losses * mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Response tokens."""
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """The sum of the policy's loss."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        loss, figures = self.policy_loss(logprobs, batch)
        return {"policy": loss}, figures

    def policy_loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """The sum of the policy's loss from its log-probs [N, K, T], and figures."""
        mask, config = batch.response_mask, self.config
        assert batch.behaviour_logprobs is not None
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = self.log_ratio(logprobs - old, mask)
        losses, clipped = self.surrogate(log_ratio, logprobs, batch)
        weights, corrected = importance_weights(old, batch.behaviour_logprobs, mask, config.correction)
        losses = losses * weights
        if self.kl_in_loss:
            assert batch.ref_logprobs is not None
            kl = kl_estimate(logprobs, batch.ref_logprobs, config.kl_estimator)
            losses = losses + self.kl_coef * (kl * log_ratio.exp() if config.kl_unbiased else kl)
        ratio = self.log_ratio(logprobs.detach() - before(batch), mask).exp()
        return self.reduce(losses, mask), {
            **mismatch(logprobs, batch),
            **corrected,
            "policy/ratio": mean_of(ratio, mask),
            "policy/clipfrac": mean_of(clipped.float(), mask),
        }


def mean_of(x: Tensor, mask: Tensor) -> Stat:
    """The mean of `x` over tokens [N, K, T], or over sequences [N, K, 1]."""
    return mean(x, mask if x.shape == mask.shape else None)
