"""GRPO: PPO's clipped ratio with advantages relative to the K samples of a prompt.

Shao et al., arXiv 2402.03300.

    A_i = (r_i - mean) / (std + 1e-4)                     mean and std over the K samples of a prompt
    loss = mean over responses of the mean over tokens of  max(-A u, -A clip(u, 1 - low, 1 + high)) + beta u k

u is the ratio of each token, beta is `algo.kl_coef`, k is the KL estimate of a token (default k3). With
`algo.kl_unbiased=false`, the last term is beta k.

Needs: K >= 2, reference log-probs.

Prompts without signal (see `rlhf.objectives.objective`): prompts whose samples all have the same reward, so
all advantages are 0. With `algo.ties=keep` (default), these prompts count in the mean, and a KL penalty in
the loss gives every prompt signal. With `algo.ties=drop`, the mean excludes these prompts.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.algorithms import Advantage, GRPOConfig, Ties
from rlhf.core.batch import Batch
from rlhf.core.metrics import selected
from rlhf.objectives.advantages import group_centred, leave_one_out, length_weighted, scaled
from rlhf.objectives.objective import Counts
from rlhf.objectives.policy_gradient import PolicyGradient, trained


class GRPO(PolicyGradient):
    """The GRPO objective: a clipped policy gradient with group-relative advantages."""

    config: GRPOConfig

    @property
    def skips_ties(self) -> bool:
        """Return True if prompts whose advantages are all 0 skip the forward pass.

        With `algo.ties=drop`, these prompts skip the forward pass even if the loss has a KL penalty.
        """
        return super().skips_ties or self.config.ties is Ties.drop

    def counted(self, batch: Batch) -> Tensor:
        """Return the trained tokens [M, K, T] bool of the M prompts over which the mean is taken."""
        mask = trained(batch)
        return mask if self.config.ties is Ties.keep or batch.signal is None else mask[batch.signal]

    def response_advantages(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Return each reward [N, K] minus its baseline (`algo.advantage`), divided by the `algo.scale`."""
        kind = self.config.advantage
        if kind is Advantage.mean:
            return self.advantages(rewards)
        if kind is Advantage.leave_one_out:
            return scaled(leave_one_out(rewards), rewards, self.config.scale)
        if kind is Advantage.opo:
            lengths = batch.response_mask.sum(-1)
            return scaled(length_weighted(rewards, lengths), rewards, self.config.scale)
        return scaled(rewards, rewards, self.config.scale)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return each reward [N, K] minus the mean reward of its prompt, divided as `algo.scale` selects."""
        return group_centred(rewards, self.config.scale)

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over responses of the mean over the trained tokens of a response."""
        return (selected(losses, mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of responses over which the mean is taken."""
        return {"policy": float(self.counted(batch).any(-1).sum())}
