"""RLOO: REINFORCE with the mean reward of a prompt's other samples as baseline.

Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; for language models: Ahmadian et al.,
arXiv 2402.14740.

    A_i = r_i - mean of the other K - 1 rewards,      r = score - beta sum_t k_t
    clip:       max(-A u, -A clip(u, 1 - low, 1 + high)),   u = exp(sum_t (logp - old)) of the whole response
    reinforce:  -A sum_t logp

`algo.loss_type` selects `clip` (default) or `reinforce`. The sum is divided by the number of responses.
k_t is the KL estimate of a token (`algo.kl_estimator`). The term beta k_t is part of the reward only with
`algo.kl_in=reward` (default).

Needs: K >= 2, reference log-probs. Prompts without signal (see `rlhf.objectives.objective`): prompts whose
samples all have the same reward. With a KL penalty in the loss (`algo.kl_in=loss`), every prompt has signal.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.algorithms import RLOOConfig
from rlhf.core.batch import Batch
from rlhf.objectives.advantages import leave_one_out
from rlhf.objectives.objective import Counts
from rlhf.objectives.policy_gradient import PolicyGradient, trained


class RLOO(PolicyGradient):
    """The RLOO objective: a policy gradient that treats a whole response as one action."""

    config: RLOOConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return each reward [N, K] minus the mean of the other rewards of its prompt."""
        return leave_one_out(rewards)

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and whether the response is clipped [N, K, 1].

        With `clip`, the loss of a response is divided equally among its tokens. With `reinforce`, each token
        has its own loss and nothing is clipped.
        """
        losses, clipped = super().surrogate(log_ratio, logprobs, batch)
        lengths = batch.response_mask.sum(-1, keepdim=True).clamp(min=1)
        return losses / lengths if self.config.has_ratio else losses, clipped

    def count(self, batch: Batch) -> Counts:
        """Return the number of responses that are trained on."""
        return {"policy": float(trained(batch).any(-1).sum())}
