"""Reward modelling: a Bradley-Terry model of preferences.

Ouyang et al., arXiv 2203.02155; details after Huang et al., arXiv 2403.17031.

    loss = -log sigmoid(r_c - r_r)

Needs: a reward model and pairs (`generator=dataset`). No signal: a pair whose labels are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from rlhf.core.metrics import mean
from rlhf.objectives.objective import Supervised, prompts_with_signal

if TYPE_CHECKING:
    from rlhf.config.algo import RewardConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics
    from rlhf.objectives.objective import Counts, Forward, Losses


class RewardModelling(Supervised):
    """The reward of the chosen response above that of the rejected one."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def credit(self, batch: Batch) -> Batch:
        """Order each pair by its labels, chosen first."""
        order = torch.argsort(batch.scores, dim=1, descending=True, stable=True)[:, [0, -1]]
        pair = batch.samples(order)
        return replace(pair, signal=pair.scores[:, 0] > pair.scores[:, 1])

    def count(self, batch: Batch) -> Counts:
        """Pairs with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Sum over pairs of the negative log-likelihood of the preference."""
        rewards = forward(batch).rewards
        assert rewards is not None
        margins = rewards[:, 0] - rewards[:, 1]
        return {"policy": -F.logsigmoid(margins).sum()}, {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": mean((margins > 0).float()),
            "rewards/margins": mean(margins),
        }
