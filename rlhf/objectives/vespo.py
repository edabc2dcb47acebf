"""VESPO: REINFORCE whose responses weigh most when their ratio to the sampler is near 1.

arXiv 2602.10693.

    W = exp(sum_t (logp - behaviour)),   log W at least log 1e-8
    loss = mean over tokens of -stopgrad(W^k exp(lambda (1 - W))) A logp

k and lambda depend on the sign of A; the weight is largest at W = k / lambda.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.config.algorithms import VESPOConfig
from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO

_SMALLEST = math.log(1e-8)  # of log W, as in TRL


class VESPO(GRPO):
    """The VESPO objective: a smooth weight of whole responses."""

    config: VESPOConfig

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T]; nothing is clipped."""
        assert batch.advantages is not None
        config, log_w, good = self.config, log_ratio.detach().clamp(min=_SMALLEST), batch.advantages >= 0
        power = torch.where(good, config.power_good, config.power_bad)
        decay = torch.where(good, config.decay_good, config.decay_bad)
        weight = (power * log_w + decay * -torch.expm1(log_w)).exp()
        return -weight * batch.advantages * logprobs, torch.zeros_like(log_ratio, dtype=torch.bool)
