"""GRPO: PPO's clipped ratio with advantages relative to the K samples of a prompt.

Shao et al., arXiv 2402.03300.

    A_i = (r_i - mean) / (std + 1e-4)                     mean and std over the K samples of a prompt
    loss = mean over responses of the mean over tokens of  max(-A u, -A clip(u, 1 - low, 1 + high)) + beta u k

u is the ratio of each token, beta is `algo.kl_coef`, k is the KL estimate of a token (default k3). With
`algo.kl_unbiased=false`, the last term is beta k.

`algo.mean` selects over what the loss is a mean:

| `algo.mean` | loss                                                           | default of             |
|-------------|----------------------------------------------------------------|------------------------|
| `tokens`    | sum over tokens / tokens: long responses have more weight      | DAPO, CISPO, M2PO, ... |
| `responses` | mean over responses of the mean over tokens                    | GRPO, GSPO             |
| `prompts`   | mean over prompts of the mean over the tokens of all responses | ScaleRL                |
| `constant`  | sum over tokens / (responses x allowed tokens)                 | Dr. GRPO               |

Variants that are settings of GRPO:

- Dr. GRPO (Liu et al., arXiv 2503.20783): `algo.mean=constant` and `algo.scale=none`, so neither short
  responses nor prompts whose rewards differ little have more weight.
- DAPO (Yu et al., arXiv 2503.14476): `algo.mean=tokens` and a higher upper clip; the mean of the paper is
  over the tokens of each group. Two parts of DAPO are separate settings. Dynamic sampling: `schedule.refill`
  samples other prompts in place of prompts without signal; `algo.ties=drop` only excludes them from the mean.
  Penalty on overlong responses: `scorer.overlong_buffer`.
- GSPO (Zheng et al., arXiv 2507.18071): one ratio per response, u = exp(mean_t (logp - old)), and a much
  narrower clip range (1 - 3e-4 to 1 + 4e-4). The factor of a KL penalty in the loss is the ratio of each
  token.
- GPG (arXiv 2504.02546): the loss of a token is -A logp, without a ratio, and `algo.scale=none`. With
  `algo.ties=drop`, prompts without variance leave sum and count, which is the factor alpha of the paper.

Needs: K >= 2, reference log-probs.

Prompts without signal (see `rlhf.objectives.objective`): prompts whose samples all have the same reward, so
all advantages are 0. With `algo.ties=keep` (default), these prompts count in the mean, and a KL penalty in
the loss gives every prompt signal. With `algo.ties=drop`, the mean excludes these prompts.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.algorithms import Advantage, GRPOConfig, Mean, Ties
from rlhf.core.batch import Batch
from rlhf.core.metrics import selected
from rlhf.objectives.advantages import centred, decoupled, leave_one_out, length_weighted, scaled
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
        kind, found = self.config.advantage, rewards
        if kind is Advantage.mean:
            return self.advantages(rewards)
        if kind is Advantage.decoupled:
            assert batch.parts is not None and batch.part_weights is not None, "validated: it is a sum"
            return decoupled(batch.parts, batch.part_weights)
        if kind is Advantage.leave_one_out:
            found = leave_one_out(rewards)
        elif kind is Advantage.opo:
            found = length_weighted(rewards, batch.response_mask.sum(-1))
        return scaled(found, rewards, self.config.scale)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return each reward [N, K] minus the mean reward of its prompt, divided as `algo.scale` selects."""
        return scaled(centred(rewards), rewards, self.config.scale)

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses [N, K, T]; `algo.mean` divides each by the tokens of its unit."""
        losses = selected(losses, mask)
        if self.config.mean_over is Mean.responses:
            return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
        if self.config.mean_over is Mean.prompts:
            return (losses.sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)).sum()
        return losses.sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of units over which `algo.mean` is taken."""
        units, over = self.counted(batch), self.config.mean_over
        width = units.shape[-1] if over is Mean.constant else 1
        if over is Mean.prompts:
            units = units.flatten(1)
        return {"policy": float((units if over is Mean.tokens else units.any(-1)).sum()) * width}
