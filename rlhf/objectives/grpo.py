"""GRPO: PPO's clipped ratio with advantages relative to the K samples of a prompt.

Shao et al., arXiv 2402.03300.

    A_i = (r_i - mean) / (std + 1e-4)                     mean and std over the K samples of a prompt
    loss = mean over responses of the mean over tokens of  max(-A u, -A clip(u, 1 - low, 1 + high)) + beta u k

u is the ratio of each token, beta is `algo.kl_coef`, k the KL estimate of a token (default k3); the factor u
of k is omitted with `algo.kl_unbiased=false`.

Needs: K >= 2, reference log-probs. No signal: if all samples of a prompt have the same reward, the advantages
are 0. With `algo.ties=keep` the prompt still counts in the mean; with `drop` it is excluded.
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
    """The GRPO objective: a clipped policy gradient with group-relative advantages."""

    config: GRPOConfig

    @property
    def skips_ties(self) -> bool:
        """Return True if prompts whose advantages are all 0 skip the forward pass.

        With `algo.ties=drop` they skip the forward pass even if the loss has a KL penalty.
        """
        return super().skips_ties or self.config.ties is Ties.drop

    def counted(self, batch: Batch) -> Tensor:
        """Return the response mask [M, K, T] of the M prompts over which the mean is taken."""
        kept = self.config.ties is Ties.keep or batch.signal is None
        return batch.response_mask if kept else batch.response_mask[batch.signal]

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the rewards [N, K] minus the mean of their group, scaled as `algo.scale` says."""
        return group_centred(rewards, self.config.scale)

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over responses of the mean over the tokens of a response."""
        return ((losses * mask).sum(-1) / mask.sum(-1)).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of responses over which the mean is taken."""
        return {"policy": float(self.counted(batch).flatten(0, 1).shape[0])}
