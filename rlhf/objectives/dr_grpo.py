"""Dr. GRPO: GRPO without what favours long wrong answers and easy or hard prompts.

Liu et al., arXiv 2503.20783. Specialises GRPO: advantages are not divided by the standard deviation
(`algo.scale=none`), and the sum over tokens is divided by a constant, the response length that was allowed,
instead of each response's own.

    A_i = r_i - mean;    loss = sum over tokens of max(-A u, -A clip(u, ...)) / (responses x allowed tokens)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.grpo import GRPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch
    from rlhf.objectives.objective import Counts


class DrGRPO(GRPO):
    """A constant divisor."""

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Every token counts alike."""
        return (losses * mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Responses times the tokens that each was allowed."""
        return {"policy": float(self.counted(batch).numel())}
