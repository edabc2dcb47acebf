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
| `sppo`           | ((z_c - t)^2 + (z_r + t)^2) / 2       | Wu et al., arXiv 2405.00675        |

e is `algo.label_smoothing`, the fraction of labels that are assumed wrong. z_c and z_r are the log-ratios of
the two responses, and t = (P - 1/2) / beta with `algo.wins` P, the probability that the chosen one wins.
`algo.length_normalised` divides each log-ratio by the number of tokens of its response (Lambert et al., arXiv
2411.15124, section 5). The weight of a pair is 1, or corrects for pairs of another policy (`algo.weighting`,
see `pair_weights`).

Online, the chosen response c is the best and the rejected response r the worst of a prompt's K samples by
score. Offline, c and r are the pair of the data set.

Needs: K >= 2, reference log-probs; with `algo.weighting=is` the log-probs of the sampler.

Prompts without signal (see `rlhf.objectives.objective`): prompts whose best and worst scores are equal. Sum
and count exclude these prompts. With `algo.ties=keep`, every prompt has signal.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.config.algorithms import DPOConfig, DPOLoss, PairWeighting, Ties
from rlhf.core.batch import Batch, Outputs
from rlhf.core.metrics import Metrics, Row, mean, sample_size, selected
from rlhf.objectives import objective
from rlhf.objectives.objective import Counts, Forward, Losses, Objective


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
        return {"policy": objective.prompts_with_signal(batch)}

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
        return {"policy": (weights * self.pair_losses(ratios)).sum()}, {
            "rewards/chosen": mean(rewards[:, 0]),
            "rewards/rejected": mean(rewards[:, 1]),
            "rewards/accuracies": objective.preferred(margins, sizes.sum(1)),
            "rewards/margins": mean(margins),
            "logps/chosen": mean(logps[:, 0]),
            "logps/rejected": mean(logps[:, 1]),
            **weighting,
            **objective.drift(logprobs, batch),
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
            "eval/loss": self.pair_losses(ratios).mean().item(),
            "eval/accuracy": (0.5 * (z.sign() + 1)).mean().item(),
            "eval/margin": (self.config.beta * z).mean().item(),
        }

    def log_ratios(self, logps: Tensor, ref_logps: Tensor, response_mask: Tensor) -> Tensor:
        """Return the log-ratios [N, 2] of policy to reference, given sums of log-probs [N, 2].

        With `algo.length_normalised`, each log-ratio is divided by the number of tokens of its response.
        """
        ratios = logps - ref_logps
        return ratios / response_mask.sum(-1).clamp(min=1) if self.config.length_normalised else ratios

    def pair_losses(self, ratios: Tensor) -> Tensor:
        """Return the loss [N] of each pair, given its log-ratios [N, 2]."""
        kind, beta, e = self.config.loss_type, self.config.beta, self.config.label_smoothing
        z = ratios[:, 0] - ratios[:, 1]
        if kind is DPOLoss.sppo:
            target = (self.config.wins - 0.5) / beta
            return 0.5 * ((ratios[:, 0] - target).square() + (ratios[:, 1] + target).square())
        if kind is DPOLoss.ipo:
            return (z - 1 / (2 * beta)).square()
        if kind is DPOLoss.hinge:
            return F.relu(1 - beta * z)
        right, wrong = -F.logsigmoid(beta * z), -F.logsigmoid(-beta * z)
        if kind is DPOLoss.robust:
            return ((1 - e) * right - e * wrong) / (1 - 2 * e)
        return (1 - e) * right + e * wrong


# Weights of preference pairs, for pairs that an older policy or another policy sampled.
#
# The loss of a pair is multiplied by a weight without gradient, computed from the current policy:
#
# | `algo.weighting` | weight of a pair        | source                             |
# |------------------|-------------------------|------------------------------------|
# | `none`           | 1                       |                                    |
# | `is`             | exp(min(l_c + l_r, 2e)) | IS-DAA, arXiv 2506.08681           |
# | `wpo`            | min(v_c v_r, clamp)     | WPO, Zhou et al., arXiv 2406.11827 |
#
#     l = sum_t (logp_t - behaviour_t)                     log-ratio of policy to sampler of a response
#     v = exp(mean_t (logp_t - log sum_v p_t(v)^2))        p_t: distribution of the policy over the vocabulary
#
# c and r are the chosen and the rejected response, e is `algo.weighting_eps`, and clamp is
# `algo.weighting_clamp`. With `is`, an on-policy pair has the weight 1. With `wpo`, v is about 1 for
# responses of the policy itself. In both cases, pairs that became improbable have small weights. The sum of
# the weighted losses is divided by the number of pairs, not by the sum of the weights.


def pair_weights(outputs: Outputs, batch: Batch, config: DPOConfig) -> tuple[Tensor, Metrics]:
    """Return the weights [N] of the pairs of a micro-batch, without gradient, and `weighting/` metrics.

    Args:
        outputs: the policy's log-probs [N, 2, T]; for `wpo` also `log_sum_squares` [N, 2, T].
        batch: the pairs; for `is` with `behaviour_logprobs`.
        config: kind and bound of the weights.
    """
    assert outputs.logprobs is not None
    logprobs, mask = outputs.logprobs.detach(), batch.response_mask
    if config.weighting is PairWeighting.none:
        return logprobs.new_ones(len(batch)), {}
    if config.weighting is PairWeighting.wpo:
        assert outputs.log_sum_squares is not None
        tokens = mask.sum(-1).clamp(min=1)
        log_weights = (selected(logprobs - outputs.log_sum_squares, mask).sum(-1) / tokens).sum(-1)
        bound = math.inf if config.weighting_clamp is None else math.log(config.weighting_clamp)
    else:
        log_weights = selected(logprobs - objective.sampler_logprobs(logprobs, batch), mask).sum((1, 2))
        bound = 2 * config.weighting_eps
    bound = min(bound, objective.MAX_LOG_WEIGHT)
    weights = log_weights.clamp(max=bound).exp()
    return weights, {
        "weighting/mean": mean(weights),
        "weighting/truncated": mean(log_weights > bound),
        "weighting/ess": sample_size(weights),
    }
