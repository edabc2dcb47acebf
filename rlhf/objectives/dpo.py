"""Direct preference optimisation, online and offline.

Rafailov et al., arXiv 2305.18290; online: Guo et al., arXiv 2402.04792.

    z = (logp_c - logp_r) - (ref_c - ref_r)                 log-probs summed over the response
    right = -log sigmoid(beta z),   wrong = -log sigmoid(-beta z)

| `algo.loss_type` | loss of a pair                        | source                             |
|------------------|---------------------------------------|------------------------------------|
| `sigmoid`        | (1 - e) right + e wrong               | with e > 0: "cDPO", Mitchell 2023  |
| `ipo`            | (z - 1 / (2 beta))^2                  | Azar et al., arXiv 2310.12036      |
| `hinge`          | max(0, 1 - beta z)                    | Zhao et al., arXiv 2305.10425      |
| `robust`         | ((1 - e) right - e wrong) / (1 - 2 e) | Chowdhury et al., arXiv 2403.00409 |

with e = `algo.label_smoothing`, the part of labels that are taken to be wrong. `algo.length_normalised`
divides each log-ratio by the tokens of its response (Lambert et al., arXiv 2411.15124, section 5).

The chosen response c is the best and r the worst of the K samples of a prompt by score; offline, the data
set's pair. Needs: reference log-probs, K >= 2. No signal: a prompt whose best and worst scores are equal
(`algo.ties`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.config.algo import DPOLoss, Ties
from rlhf.core.metrics import mean
from rlhf.objectives.objective import Objective, drift, prompts_with_signal

if TYPE_CHECKING:
    from rlhf.config.algo import DPOConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics
    from rlhf.objectives.objective import Counts, Forward, Losses


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

    def count(self, batch: Batch) -> Counts:
        """Pairs with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Sum over pairs of the loss on their margin."""
        assert batch.ref_logprobs is not None
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        logps = logprobs.sum(-1)  # [N, 2]
        ratios = logps - batch.ref_logprobs.sum(-1)
        if self.config.length_normalised:
            ratios = ratios / batch.response_mask.sum(-1)
        rewards = self.config.beta * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        return {"policy": self.pair_losses(ratios[:, 0] - ratios[:, 1]).sum()}, {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": mean((margins > 0).float()),
            "rewards/margins": mean(margins),
            "logps/chosen": mean(logps[:, 0]),
            "logps/rejected": mean(logps[:, 1]),
            **drift(logprobs, batch),
        }

    def pair_losses(self, z: Tensor) -> Tensor:
        """The loss [N] of each pair from its margin z [N]."""
        kind, beta, e = self.config.loss_type, self.config.beta, self.config.label_smoothing
        if kind is DPOLoss.ipo:
            return (z - 1 / (2 * beta)).square()
        if kind is DPOLoss.hinge:
            return F.relu(1 - beta * z)
        right, wrong = -F.logsigmoid(beta * z), -F.logsigmoid(-beta * z)
        if kind is DPOLoss.robust:
            return ((1 - e) * right - e * wrong) / (1 - 2 * e)
        return (1 - e) * right + e * wrong
