"""DAPO: GRPO with every token of the batch counting alike, and more room upwards than downwards.

Yu et al., arXiv 2503.14476. Specialises GRPO: the mean is over all tokens of the minibatch, so long responses
weigh more; ratios are clipped at 1 - 0.2 and 1 + 0.28; no KL. Of the paper's dynamic sampling there is
`algo.ties=drop`, which leaves groups without signal out of the mean but samples no others in their place; its
penalty on overlong responses is `scorer.missing_eos_penalty`.

    loss = sum over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)) / response tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.grpo import GRPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch
    from rlhf.objectives.objective import Counts


class DAPO(GRPO):
    """A mean over tokens."""

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Every token counts alike."""
        return (losses * mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Response tokens."""
        return {"policy": float(self.counted(batch).sum())}
