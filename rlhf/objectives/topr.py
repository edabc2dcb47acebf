"""TOPR: REINFORCE whose ratios weigh only the responses with a negative advantage.

Le Roux et al., arXiv 2503.14286, equation 8.

    loss = mean over responses of -alpha A sum_t logp
    alpha = 1 where A >= 0,   min(exp(sum_t (logp - behaviour)), 1) where A < 0;   without gradient

So a response that the policy already avoids is not pushed away further, and a good response is learned with
full weight, however unlikely it has become. A is the reward minus a baseline (`algo.advantage`; `none`: the
reward itself). With `algo.level=token`, each token has its own ratio and the mean is over tokens, as in other
frameworks; `geometric` uses the geometric mean of a response.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algorithms import Level, Mean, TOPRConfig
from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import Counts

_TAPERED = 0.999  # `policy/clipfrac` is the share of weights below this


class TOPR(GRPO):
    """The TOPR objective: tapered weights of the responses to avoid."""

    config: TOPRConfig

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and which weights are below 1 by more than rounding."""
        assert batch.advantages is not None
        tapered = log_ratio.detach().clamp(max=0.0).exp()
        avoid = batch.scores[..., None] <= 0 if self.config.sign_of_score else batch.advantages < 0
        alpha = torch.where(avoid, tapered, 1.0)
        return -alpha * batch.advantages * logprobs, alpha < _TAPERED

    def count(self, batch: Batch) -> Counts:
        """Return the number of units; with ratios of responses, `algo.mean=tokens` counts responses."""
        if self.config.level is Level.token or self.config.mean_over is not Mean.tokens:
            return super().count(batch)
        return {"policy": float(self.counted(batch).any(-1).sum())}
