"""CISPO: REINFORCE on every token, weighted by its ratio, which is cut off above and carries no gradient.

MiniMax, arXiv 2506.13585. Specialises DAPO (a mean over the tokens of the minibatch): no token loses its
gradient by clipping, whatever its ratio.

    loss = sum over tokens of -stopgrad(clip(u, 1 - low, 1 + high)) A logp / response tokens

The lower bound is off (`algo.clip_low=1`), as in the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.dapo import DAPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch


class CISPO(DAPO):
    """Clipped weights, not clipped updates."""

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """REINFORCE, weighted."""
        assert batch.advantages is not None
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return -weight * batch.advantages * logprobs, weight != ratio
