"""RLOO: REINFORCE with the mean of a prompt's other samples as baseline.

Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; for language models: Ahmadian et al.,
arXiv 2402.14740.

    A_i = r_i - mean of the other K - 1,      r = score - beta sum_t (old - ref)
    clip:       max(-A u, -A clip(u, 1 - low, 1 + high)),   u = exp(sum_t (logp - old)), of the whole response
    reinforce:  -A sum_t logp

divided by the number of responses. Needs: K >= 2, reference log-probs. No signal: a prompt whose samples all
have the same reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.algo import RLOOLoss
from rlhf.objectives.advantages import leave_one_out
from rlhf.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from rlhf.config.algo import RLOOConfig
    from rlhf.core.batch import Batch
    from rlhf.objectives.objective import Counts


class RLOO(PolicyGradient):
    """A whole response is one action."""

    config: RLOOConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        """Leave one out."""
        return leave_one_out(rewards)

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Of the whole response: [N, K, 1]."""
        return (difference * mask).sum(-1, keepdim=True)

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a response, in equal shares for its tokens; or REINFORCE, token by token."""
        assert batch.advantages is not None
        if self.config.loss_type is RLOOLoss.reinforce:
            return -batch.advantages * logprobs, torch.zeros_like(log_ratio, dtype=torch.bool)
        losses, clipped = super().surrogate(log_ratio, logprobs, batch)
        return losses / batch.response_mask.sum(-1, keepdim=True), clipped[..., :1]

    def count(self, batch: Batch) -> Counts:
        """Responses."""
        return {"policy": float(batch.episodes)}
