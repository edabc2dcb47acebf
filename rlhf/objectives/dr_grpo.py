"""Dr. GRPO: GRPO without the bias towards long wrong answers and towards easy or hard prompts.

Liu et al., arXiv 2503.20783. A variant of GRPO: advantages are not divided by the standard deviation
(`algo.scale=none`), and the sum over tokens is divided by a constant, the allowed response length, instead of
the length of each response.

    A_i = r_i - mean
    loss = sum over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)) / (responses x allowed tokens)

u is the ratio of each token.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.metrics import selected
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import Counts


class DrGRPO(GRPO):
    """The Dr. GRPO objective: GRPO with a constant divisor."""

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses [N, K, T] over all response tokens."""
        return selected(losses, mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of responses times the allowed response length in tokens."""
        counted = self.counted(batch)
        return {"policy": float(counted.any(-1).sum()) * counted.shape[-1]}
