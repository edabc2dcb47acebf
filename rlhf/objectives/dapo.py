"""DAPO: GRPO with a mean over all tokens of the minibatch and a higher upper clip.

Yu et al., arXiv 2503.14476. A variant of GRPO: all tokens have the same weight, so long responses have more
weight. By default, ratios are clipped at 1 - 0.2 and 1 + 0.28, and there is no KL penalty.

    loss = sum over tokens of max(-A u, -A clip(u, 1 - low, 1 + high)) / response tokens

u is the ratio of each token. The mean of the paper is over the tokens of each group. Two parts of the paper
are separate settings. Dynamic sampling: `schedule.refill` samples other prompts in place of prompts without
signal; `algo.ties=drop` only excludes them from the mean. Penalty on overlong responses:
`scorer.missing_eos_penalty`.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.metrics import selected
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import Counts


class DAPO(GRPO):
    """The DAPO objective: GRPO with a mean over tokens."""

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses [N, K, T] over all response tokens."""
        return selected(losses, mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens over which the mean is taken."""
        return {"policy": float(self.counted(batch).sum())}
