"""GSPO: GRPO with one ratio for a whole response, the geometric mean of its tokens' ratios.

Zheng et al., arXiv 2507.18071. Specialises GRPO: the ratio, whose clip is so much narrower; no KL.

    u = exp(mean_t (logp - old))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.grpo import GRPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch


class GSPO(GRPO):
    """A ratio of sequences, at the scale of a token."""

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """The mean over the tokens of a response: [N, K, 1]."""
        return (difference * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same; clipped is the response as a whole."""
        losses, clipped = super().surrogate(log_ratio, logprobs, batch)
        return losses, clipped[..., :1]
