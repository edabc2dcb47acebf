"""GRPO: PPO's clipped ratio with advantages from the group of a prompt's samples.

Shao et al., arXiv 2402.03300.

    A_i = (r_i - mean) / (std + 1e-4)                          of the K samples of a prompt
    loss = mean over responses of the mean over tokens of  max(-A u, -A clip(u, 1 - low, 1 + high)) + beta k3

with u the ratio of each token. Needs: K >= 2, reference log-probs. No signal: a prompt whose samples all
score the same has advantage 0; `algo.ties` says whether it still counts in the mean (`keep`) or not (`drop`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.config.algo import Ties
from rlhf.objectives.advantages import group_centred
from rlhf.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from rlhf.config.algo import GRPOConfig
    from rlhf.core.batch import Batch
    from rlhf.objectives.objective import Counts


class GRPO(PolicyGradient):
    """Better or worse than the others of the group."""

    config: GRPOConfig

    @property
    def spares_ties(self) -> bool:
        """Where ties are dropped, the KL of those prompts is, too."""
        return super().spares_ties or self.config.ties is Ties.drop

    def counted(self, batch: Batch) -> Tensor:
        """The response mask [M, K, T] of the prompts that the mean is over."""
        kept = self.config.ties is Ties.keep or batch.signal is None
        return batch.response_mask if kept else batch.response_mask[batch.signal]

    def advantages(self, rewards: Tensor) -> Tensor:
        """Centred in the group."""
        return group_centred(rewards, self.config.scale)

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Mean over the tokens of a response, sum over responses."""
        return ((losses * mask).sum(-1) / mask.sum(-1)).sum()

    def count(self, batch: Batch) -> Counts:
        """Responses."""
        return {"policy": float(self.counted(batch).flatten(0, 1).shape[0])}
