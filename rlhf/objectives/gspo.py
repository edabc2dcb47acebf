"""GSPO: GRPO with one ratio per response, the geometric mean of the ratios of its tokens.

Zheng et al., arXiv 2507.18071. A variant of GRPO that differs only in the ratio. By default, the clip range
is much narrower (1 - 3e-4 to 1 + 4e-4), and there is no KL penalty.

    u = exp(mean_t (logp - old))
    loss = mean over responses of max(-A u, -A clip(u, 1 - low, 1 + high))

The factor of a KL penalty in the loss (`algo.kl_unbiased`) is the ratio of each token.

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.metrics import selected
from rlhf.objectives.correction import over_tokens
from rlhf.objectives.grpo import GRPO


class GSPO(GRPO):
    """The GSPO objective: GRPO with a length-normalised ratio of whole responses."""

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of `difference` [N, K, T] over the tokens of each response: [N, K, 1]."""
        return over_tokens(selected(difference, mask), mask, averaged=True)

    def kl_log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Return `difference` [N, K, T]: the factor of the KL term is the ratio of each token."""
        return difference

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and whether the response is clipped [N, K, 1]."""
        losses, clipped = super().surrogate(log_ratio, logprobs, batch)
        return losses, clipped[..., :1]
