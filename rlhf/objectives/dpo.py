"""DPO: direct preference optimisation, online and offline.

Rafailov et al., arXiv 2305.18290; online: Guo et al., arXiv 2402.04792.

    z = (logp_c - logp_r) - (ref_c - ref_r)                 log-probs summed over the response
    right = -log sigmoid(beta z),   wrong = -log sigmoid(-beta z)
    loss = mean over pairs of weight * the loss in the table:

| `algo.loss_type` | loss of a pair                        | source                             |
|------------------|---------------------------------------|------------------------------------|
| `sigmoid`        | (1 - e) right + e wrong               | with e > 0: "cDPO", Mitchell 2023  |
| `ipo`            | (z - 1 / (2 beta))^2                  | Azar et al., arXiv 2310.12036      |
| `hinge`          | max(0, 1 - beta z)                    | Zhao et al., arXiv 2305.10425      |
| `robust`         | ((1 - e) right - e wrong) / (1 - 2 e) | Chowdhury et al., arXiv 2403.00409 |

e is `algo.label_smoothing`, the fraction of labels that are assumed wrong. `algo.length_normalised` divides
each log-ratio by the number of tokens of its response (Lambert et al., arXiv 2411.15124, section 5). The
weight of a pair is 1, or corrects for pairs of another policy (`algo.weighting`, see
`rlhf.objectives.pair_weights`).

Online, the chosen response c is the best and the rejected response r the worst of a prompt's K samples by
score. Offline, c and r are the pair of the data set.

Needs: K >= 2, reference log-probs; with `algo.weighting=is` the log-probs of the sampler.

Prompts without signal (see `rlhf.objectives.objective`): prompts whose best and worst scores are equal. Sum
and count exclude these prompts. With `algo.ties=keep`, every prompt has signal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.config.algorithms import DPOLoss, PairWeighting, Ties
from rlhf.core.metrics import mean, selected
from rlhf.objectives.objective import Objective, drift, preferred, prompts_with_signal
from rlhf.objectives.pair_weights import pair_weights

if TYPE_CHECKING:
    from rlhf.config.algorithms import DPOConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics, Row
    from rlhf.objectives.objective import Counts, Forward, Losses


class OnlineDPO(Objective):
    """The DPO objective: prefer the best of K samples over the worst."""

    needs = frozenset({"ref_logprobs"})

    def __init__(self, config: DPOConfig) -> None:
        self.config = config
        self.kl_coef = config.beta
        if config.weighting is PairWeighting.wpo:
            self.needs |= {"log_sum_squares"}

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with two samples of each prompt: the chosen response, then the rejected response.

        A prompt whose two scores are equal has no signal, unless `algo.ties=keep`.
        """
        last = batch.scores.shape[1] - 1
        chosen = batch.scores.argmax(1)  # the first of equal maxima
        rejected = last - batch.scores.flip(1).argmin(1)  # differs from `chosen` even if all scores are equal
        pair = batch.samples(torch.stack([chosen, rejected], 1))
        if self.config.ties is Ties.keep:
            return pair
        return replace(pair, signal=pair.scores[:, 0] > pair.scores[:, 1])

    def count(self, batch: Batch) -> Counts:
        """Return the number of pairs with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sum of the weighted pair losses over a micro-batch, and metrics."""
        assert batch.ref_logprobs is not None
        outputs = forward(batch)
        logprobs = outputs.logprobs
        assert logprobs is not None
        weights, weighting = pair_weights(outputs, batch, self.config)
        logps = selected(logprobs, batch.response_mask).sum(-1)  # [N, 2]
        ref_logps = selected(batch.ref_logprobs, batch.response_mask).sum(-1)
        ratios = self.log_ratios(logps, ref_logps, batch.response_mask)
        sizes = -self.config.beta * self.log_ratios(logps, -ref_logps, batch.response_mask)
        rewards = self.config.beta * ratios.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        return {"policy": (weights * self.pair_losses(ratios[:, 0] - ratios[:, 1])).sum()}, {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": preferred(margins, sizes.sum(1)),
            "rewards/margins": mean(margins),
            "logps/chosen": mean(logps[:, 0]),
            "logps/rejected": mean(logps[:, 1]),
            **weighting,
            **drift(logprobs, batch),
        }

    def held_out(self, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> Row:
        """Return loss, accuracy and margin of held-out pairs, the chosen response first.

        A margin is `beta` times z of the pair. The accuracy is the fraction of pairs with a positive margin,
        plus half the fraction of pairs with margin 0, so the reference itself has an accuracy of 0.5. All
        pairs have the weight 1.

        Args:
            logprobs: log-probs [N, 2, T] of the policy.
            ref_logprobs: log-probs [N, 2, T] of the reference.
            response_mask: True for the tokens of the responses [N, 2, T].
        """
        logps, ref_logps = (selected(x.double(), response_mask).sum(-1) for x in (logprobs, ref_logprobs))
        ratios = self.log_ratios(logps, ref_logps, response_mask)
        z = ratios[:, 0] - ratios[:, 1]
        return {
            "eval/loss": self.pair_losses(z).mean().item(),
            "eval/accuracy": (0.5 * (z.sign() + 1)).mean().item(),
            "eval/margin": (self.config.beta * z).mean().item(),
        }

    def log_ratios(self, logps: Tensor, ref_logps: Tensor, response_mask: Tensor) -> Tensor:
        """Return the log-ratios [N, 2] of policy to reference, given sums of log-probs [N, 2].

        With `algo.length_normalised`, each log-ratio is divided by the number of tokens of its response.
        """
        ratios = logps - ref_logps
        return ratios / response_mask.sum(-1).clamp(min=1) if self.config.length_normalised else ratios

    def pair_losses(self, z: Tensor) -> Tensor:
        """Return the loss [N] of each pair, given z [N], the difference of the two log-ratios."""
        kind, beta, e = self.config.loss_type, self.config.beta, self.config.label_smoothing
        if kind is DPOLoss.ipo:
            return (z - 1 / (2 * beta)).square()
        if kind is DPOLoss.hinge:
            return F.relu(1 - beta * z)
        right, wrong = -F.logsigmoid(beta * z), -F.logsigmoid(-beta * z)
        if kind is DPOLoss.robust:
            return ((1 - e) * right - e * wrong) / (1 - 2 * e)
        return (1 - e) * right + e * wrong
