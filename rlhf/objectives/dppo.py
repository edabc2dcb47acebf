"""DPPO: a policy gradient that masks tokens whose probability moved too far from the sampler's.

arXiv 2602.04879, in its binary form: a token against all other tokens.

    p = exp(logp), q = exp(behaviour)
    divergence   tv: |p - q|     kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    keep = not (A > 0, p > q and divergence > limit_high) and not (A < 0, p < q and divergence > limit_low)
    loss = mean over tokens of -stopgrad(min(p / q, cap) keep) A logp

A ratio says little about a token of small probability; the divergence is the part of the distribution that
moved. Masked tokens count in the mean. `algo.both_sides` masks whatever the sign of A is. With
`algo.anchor=old`, q is the trainer before the update.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.algorithms import DPPOConfig, DPPODivergence
from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO

_EPS = 1e-8  # keeps the logarithm of 1 - p finite


class DPPO(GRPO):
    """The DPPO objective: a trust region in probabilities."""

    config: DPPOConfig

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and which tokens are masked (bool)."""
        assert batch.advantages is not None
        now, advantages, moved = logprobs.detach(), batch.advantages, log_ratio.detach()
        low, high = self.config.limits
        p, q = now.exp(), (now - moved).exp()
        if self.config.divergence is DPPODivergence.tv:
            divergence = (p - q).abs()
        else:
            divergence = -q * moved + (1 - q) * ((1 - q + _EPS) / (1 - p + _EPS)).log()
        way = p - q if self.config.both_sides else advantages
        masked = ((way > 0) & (p > q) & (divergence > high)) | ((way < 0) & (p < q) & (divergence > low))
        weight = moved.exp().clamp(max=self.config.cap).masked_fill(masked, 0.0)
        return -weight * advantages * logprobs, masked
