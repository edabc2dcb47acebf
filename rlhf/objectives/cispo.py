"""CISPO: REINFORCE on every token, weighted by a clipped ratio without gradient.

MiniMax, arXiv 2506.13585. Specialises DAPO (a mean over the tokens of the minibatch): clipping bounds the
weight of a token but never removes the token's gradient.

    loss = sum over tokens of -stopgrad(clip(u, 1 - low, 1 + high)) A logp / response tokens

By default there is no lower bound (`algo.clip_low=1`), as in the paper.

Needs: as GRPO, K >= 2 and reference log-probs. No signal: as GRPO, a prompt whose samples all have the same
reward (`algo.ties`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.objectives.dapo import DAPO

if TYPE_CHECKING:
    from rlhf.core.batch import Batch


class CISPO(DAPO):
    """The CISPO objective: REINFORCE with clipped importance weights."""

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted REINFORCE loss of each token [N, K, T], and where its weight is clipped."""
        assert batch.advantages is not None
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return -weight * batch.advantages * logprobs, weight != ratio
