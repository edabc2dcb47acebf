"""DAPO: GRPO with a mean over all tokens of the minibatch and a higher upper clip.

Yu et al., arXiv 2503.14476. Specialises GRPO: all tokens have the same weight, so long responses weigh more;
ratios are clipped at 1 - 0.2 and 1 + 0.28; no KL penalty by default.

    loss = sum over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)) / response tokens

Two parts of the paper are settings. For dynamic sampling there is `algo.ties=drop`, which excludes prompts
without signal from the mean but samples no replacements. For the penalty on overlong responses there is
`scorer.missing_eos_penalty`.

Needs: as GRPO, K >= 2 and reference log-probs. No signal: as GRPO, a prompt whose samples all have the same
reward (`algo.ties`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.grpo import GRPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch
    from rlhf.objectives.objective import Counts


class DAPO(GRPO):
    """The DAPO objective: GRPO with a mean over tokens."""

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over all response tokens."""
        return (losses * mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens over which the mean is taken."""
        return {"policy": float(self.counted(batch).sum())}
