"""SAPO: a sigmoid of the ratio in place of PPO's clip.

arXiv 2511.20347.

    loss = mean over tokens of -A sigmoid(tau (u - 1)) 4 / tau

The gradient is that of -A u at u = 1, and falls smoothly on both sides. tau depends on the sign of A.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algorithms import SAPOConfig
from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO


class SAPO(GRPO):
    """The SAPO objective: a soft gate of each token."""

    config: SAPOConfig

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T]; nothing is clipped."""
        assert batch.advantages is not None
        tau = torch.where(batch.advantages > 0, self.config.tau_good, self.config.tau_bad)
        gate = (tau * torch.expm1(log_ratio)).sigmoid() * 4 / tau
        return -batch.advantages * gate, torch.zeros_like(log_ratio, dtype=torch.bool)
