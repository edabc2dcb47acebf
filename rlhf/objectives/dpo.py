"""Direct preference optimisation, online and offline.

Rafailov et al., arXiv 2305.18290; online: Guo et al., arXiv 2402.04792; ipo: Azar et al., arXiv 2310.12036.

    z = (logp_c - logp_r) - (ref_c - ref_r)             log-probs summed over the response
    sigmoid:  -log sigmoid(beta z)                      ipo:  (z - 1 / (2 beta))^2

The chosen response c is the best and r the worst of the K samples of a prompt by score; offline, the data
set's pair. Needs: reference log-probs, K >= 2. No signal: a prompt whose best and worst scores are equal
(`algo.ties`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.batch import Batch
from rlhf.metrics import Metrics, mean
from rlhf.objectives.config import DPOConfig, DPOLoss, Ties
from rlhf.objectives.objective import Forward, Objective, drift


class OnlineDPO(Objective):
    """Best against worst of K."""

    needs = frozenset({"ref_logprobs"})

    def __init__(self, config: DPOConfig) -> None:
        self.config = config
        self.kl_coef = config.beta

    def credit(self, batch: Batch) -> Batch:
        """Keep two samples of each prompt, chosen first; a tied prompt has no signal unless ties are kept."""
        last = batch.scores.shape[1] - 1
        chosen = batch.scores.argmax(1)  # the first of the best
        rejected = last - batch.scores.flip(1).argmin(1)  # the last of the worst: another one, even in a tie
        pair = batch.samples(torch.stack([chosen, rejected], 1))
        if self.config.ties is Ties.keep:
            return pair
        return replace(pair, signal=pair.scores[:, 0] > pair.scores[:, 1])

    def count(self, batch: Batch) -> float:
        """Pairs with signal."""
        return float(len(batch) if batch.signal is None else batch.signal.sum())

    def loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, Metrics]:
        """Sum over pairs of the loss on their margin."""
        assert batch.ref_logprobs is not None
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        logps = logprobs.sum(-1)  # [N, 2]
        ratios = logps - batch.ref_logprobs.sum(-1)
        z = ratios[:, 0] - ratios[:, 1]
        if self.config.loss_type is DPOLoss.ipo:
            losses = (z - 1 / (2 * self.config.beta)).square()
        else:
            losses = -F.logsigmoid(self.config.beta * z)
        rewards = self.config.beta * ratios
        return losses.sum(), {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": mean((z > 0).float()),
            "rewards/margins": mean(self.config.beta * z),
            "logps/chosen": mean(logps[:, 0]),
            "logps/rejected": mean(logps[:, 1]),
            **drift(logprobs, batch),
        }
