"""GPG: REINFORCE with the mean reward of the prompt as baseline, and no ratio.

arXiv 2504.02546. Prompts without variance leave sum and count (`algo.ties=drop`): this is the factor alpha
of the paper.

    loss = mean over responses of the mean over tokens of -A logp

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO


class GPG(GRPO):
    """The GPG objective: the plain policy gradient."""

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T]; nothing is clipped."""
        assert batch.advantages is not None
        return -batch.advantages * logprobs, torch.zeros_like(log_ratio, dtype=torch.bool)
