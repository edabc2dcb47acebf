"""REINFORCE++: PPO's loss without a value model; the advantage is the whitened reward to go.

Hu et al., arXiv 2501.03262.

    r_t = -beta k_t, and at the last token also the score
    A_t = whitened sum_j gamma^j r_t+j                       over the response tokens of the rollout batch

The loss is PPO's clipped surrogate. With `algo.advantage=mean`, the mean score of the prompt is subtracted
from the score ("REINFORCE++-baseline"). Long responses count more in the whitening.

Needs: K >= 2, reference log-probs. Prompts without signal: none, because tied prompts are whitened, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rlhf.config.algorithms import ReinforcePPConfig
from rlhf.core.batch import Batch
from rlhf.objectives.advantages import gae, whiten
from rlhf.objectives.grpo import GRPO


class ReinforcePP(GRPO):
    """The REINFORCE++ objective: whitened rewards to go."""

    config: ReinforcePPConfig

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages [N, K, T]; every prompt has signal."""
        mask, score = batch.response_mask, self.response_advantages(self.scores(batch), batch)
        rewards = self.token_rewards(self.kl(batch), score, mask)
        to_go = gae(rewards, torch.zeros_like(rewards), self.config.gamma, 1.0, mask)
        return self.coupled(replace(batch, advantages=whiten(to_go, mask), signal=None))
