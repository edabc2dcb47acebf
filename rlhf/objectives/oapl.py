"""OAPL: regression of the log-ratio of a response on its optimal advantage.

arXiv 2602.19362; with `algo.anchor=reference` the loss of A*-PO, arXiv 2505.20686.

    V = beta_value log mean_i exp(r_i / beta_value)             over the K samples of the prompt
    loss = mean over responses of (beta sum_t (logp - anchor) - (r - V))^2

The policy that minimises a KL-regularised objective satisfies beta_value log(policy / anchor) = r - V. So the
regression needs no ratio weights, no clipping and no log-probs of the trainer before the update, however old
the samples are. The anchor is the sampler (default) or the frozen reference.

Needs: K >= 2, reference log-probs. Prompts without signal: none, because a tied prompt pulls the policy
towards the anchor.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlhf.config.algorithms import OAPLAnchor, OAPLConfig
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, mean, selected
from rlhf.objectives.objective import Counts, Forward, Losses, Objective, drift


class OAPL(Objective):
    """The OAPL objective: least squares between log-ratios and optimal advantages."""

    needs = frozenset({"ref_logprobs"})

    def __init__(self, config: OAPLConfig) -> None:
        self.config = config

    def count(self, batch: Batch) -> Counts:
        """Return the number of responses."""
        return {"policy": float(batch.episodes)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sum of the squared residuals of a micro-batch, and metrics."""
        logprobs = forward(batch).logprobs
        of_reference = self.config.anchor is OAPLAnchor.reference
        anchor = batch.ref_logprobs if of_reference else batch.behaviour_logprobs
        assert logprobs is not None and anchor is not None
        advantages = batch.scores - optimal_value(batch.scores, self.config.beta_value)
        log_ratios = selected(logprobs - anchor, batch.response_mask).sum(-1)
        residuals = self.config.beta * log_ratios - advantages
        return {"policy": residuals.square().sum()}, {
            "oapl/advantage": mean(advantages),
            **drift(logprobs, batch),
        }


def optimal_value(scores: Tensor, beta: float) -> Tensor:
    """Return the optimal value [N, 1] of each prompt, estimated from the scores [N, K] of its samples."""
    return beta * ((scores / beta).logsumexp(1, keepdim=True) - math.log(scores.shape[1]))
