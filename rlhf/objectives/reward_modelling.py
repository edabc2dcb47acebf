"""Reward modelling: a Bradley-Terry model of preferences.

Ouyang et al., arXiv 2203.02155; details after Huang et al., arXiv 2403.17031.

    loss = -log sigmoid(r_c - r_r)        mean over pairs; rewards of the chosen and the rejected response

Needs: a reward model and preference pairs (`generator=dataset`). Prompts without signal (see
`rlhf.objectives.objective`): pairs with equal labels. Sum and count exclude these pairs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from rlhf.config.algorithms import RewardConfig
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, mean
from rlhf.objectives.objective import Counts, Forward, Losses, Supervised, preferred, prompts_with_signal


class RewardModelling(Supervised):
    """The reward-modelling objective: the chosen response gets a higher reward than the rejected response."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with the samples of each pair ordered by label, the chosen response first."""
        order = torch.argsort(batch.scores, dim=1, descending=True, stable=True)[:, [0, -1]]
        pair = batch.samples(order)
        return replace(pair, signal=pair.scores[:, 0] > pair.scores[:, 1])

    def count(self, batch: Batch) -> Counts:
        """Return the number of pairs with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sum over pairs of the negative log-likelihood of the preference, and metrics."""
        rewards = forward(batch).rewards
        assert rewards is not None
        margins = rewards[:, 0] - rewards[:, 1]
        return {"policy": -F.logsigmoid(margins).sum()}, {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": preferred(margins, rewards.abs().sum(1)),
            "rewards/margins": mean(margins),
        }
