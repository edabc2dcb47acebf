"""CISPO: REINFORCE on every token, weighted by a clipped ratio without gradient.

MiniMax, arXiv 2506.13585. A variant of DAPO, with the same mean over the tokens of the minibatch. Clipping
bounds the weight of a token, but never removes the gradient of the token.

    loss = sum over tokens of -stopgrad(clip(u, 1 - low, 1 + high)) A logp / response tokens

u is the ratio of each token. By default there is no lower bound (`algo.clip_low=1`), as in the paper. The
paper's ratio is relative to the sampler (`algo.anchor=behaviour`).

Needs: K >= 2, reference log-probs. Prompts without signal: as in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.objectives.grpo import GRPO


class CISPO(GRPO):
    """The CISPO objective: REINFORCE with clipped importance weights."""

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the REINFORCE loss of each token [N, K, T], and which weights are clipped (bool)."""
        assert batch.advantages is not None
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return -weight * batch.advantages * logprobs, weight != ratio
