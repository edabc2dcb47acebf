"""The base class of the policy-gradient objectives: rewards, ratio, clipping, KL penalty and correction.

PPO's clipped surrogate: Schulman et al., arXiv 1707.06347.

    reward      r = score - beta sum_t k_t          the KL term only with `algo.kl_in=reward`
    ratio       u = exp(logp - old)                 `old`: log-probs of the trainer just before this update
    surrogate   max(-A u, -A clip(u, 1 - low, 1 + high))
    loss        sum of w * surrogate + beta u k     the KL term only with `algo.kl_in=loss`

k is the KL estimate of a token (`algo.kl_estimator`), beta is `algo.kl_coef`. w is the importance weight of
the off-policy correction (`rlhf.objectives.correction`). With the factor u, the gradient of the KL term is an
unbiased estimate of the gradient of the KL (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
`algo.kl_unbiased=false` omits this factor.

An algorithm overrides some of the methods `advantages`, `log_ratio`, `surrogate`, `reduce` and `count`.
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
from rlhf.objectives.objective import Objective, mismatch, old_or_behaviour

if TYPE_CHECKING:
    from rlhf.config.algo import PolicyGradientConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics, Stat
    from rlhf.objectives.objective import Counts, Forward, Losses


class PolicyGradient(Objective):
    """A policy-gradient objective: raises the log-prob of each token in proportion to its advantage."""

    shows_loss = (
        False  # advantages sum to about 0, and the ratio is 1 at the first step: only the gradient counts
    )

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        self.kl_coef = config.kl_coef
        self.needs = frozenset({"ref_logprobs", "ratio"})
        if self.kl_in_reward:
            self.needs |= {"old_logprobs"}

    @property
    def kl_in_reward(self) -> bool:
        """Return True if the KL penalty is subtracted from the rewards."""
        return self.config.kl_in is KLIn.reward and self.config.kl_coef > 0

    @property
    def kl_in_loss(self) -> bool:
        """Return True if the KL penalty is added to the loss."""
        return self.config.kl_in is KLIn.loss and self.config.kl_coef > 0

    @property
    def skips_ties(self) -> bool:
        """Return True if prompts whose advantages are all 0 skip the forward pass.

        Such a prompt has a gradient only if the loss has a KL penalty.
        """
        return not self.kl_in_loss

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages [N, K, T], equal for all tokens of a response, and signal [N]."""
        rewards = self.scores(batch)
        if self.kl_in_reward:
            rewards = rewards - self.kl_coef * self.kl(batch).sum(-1)
        advantages = self.advantages(rewards)
        return replace(
            batch,
            advantages=advantages[:, :, None] * batch.response_mask,
            signal=(advantages != 0).any(1) if self.skips_ties else None,
        )

    def scores(self, batch: Batch) -> Tensor:
        """Return the scores [N, K], if configured normalised over the batch, then clipped."""
        scores = batch.scores
        if self.config.normalize_scores:
            scores = (scores - scores.mean()) / (scores.std() + 1e-8)
        if self.config.clip_scores is not None:
            scores = scores.clamp(-self.config.clip_scores, self.config.clip_scores)
        return scores

    def kl(self, batch: Batch) -> Tensor:
        """Return the KL estimates [N, K, T] of the policy before this update; 0 at padding."""
        assert batch.ref_logprobs is not None
        kl = kl_estimate(old_or_behaviour(batch), batch.ref_logprobs, self.config.kl_estimator)
        return kl * batch.response_mask

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages [N, K] of responses, given their rewards [N, K]."""

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Return the logarithm of the ratio u, given `logp - old` [N, K, T]; here u is per token."""
        return difference

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T] without w and KL, and a bool mask of the clipped ratios.

        Args:
            log_ratio: logarithm of the ratio [N, K, T], or [N, K, 1] for a ratio of sequences.
            logprobs: log-probs [N, K, T] of the policy being trained.
            batch: the micro-batch with advantages [N, K, T].
        """
        assert batch.advantages is not None
        ratio = log_ratio.exp()
        free = -batch.advantages * ratio
        bound = -batch.advantages * ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return torch.maximum(free, bound), bound > free

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses [N, K, T], which the engine divides by `count`; all tokens weigh 1."""
        return (losses * mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens."""
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sum of the policy loss over a micro-batch, and metrics."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        loss, metrics = self.policy_loss(logprobs, batch)
        return {"policy": loss}, metrics

    def policy_loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the sum of the policy loss, given the policy's log-probs [N, K, T], and metrics."""
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
        ratio = self.log_ratio(logprobs.detach() - old_or_behaviour(batch), mask).exp()
        return self.reduce(losses, mask), {
            **mismatch(logprobs, batch),
            **corrected,
            "policy/ratio": mean_of(ratio, mask),
            "policy/clipfrac": mean_of(clipped.float(), mask),
        }


def mean_of(x: Tensor, mask: Tensor) -> Stat:
    """Return the mean of `x`: over response tokens if `x` is [N, K, T], over sequences if [N, K, 1]."""
    return mean(x, mask if x.shape == mask.shape else None)
