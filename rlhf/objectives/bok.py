"""Best-of-K fine-tuning: maximum likelihood of the best of K samples.

Gulcehre et al., arXiv 2308.08998; Noukhovitch et al., arXiv 2410.18252, with K = 2.

    loss = - sum_t logp(best_t)        over the tokens of the best response; divided by the number of prompts

Needs: K >= 2. The reference is measured against, not trained towards: nothing in the loss holds the policy
near it. No signal: a prompt whose samples all score the same (`algo.ties`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.algo import Ties
from rlhf.core.metrics import mean
from rlhf.objectives.objective import Objective, drift, prompts_with_signal

if TYPE_CHECKING:
    from rlhf.config.algo import BestOfKConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics
    from rlhf.objectives.objective import Counts, Forward, Losses


class BestOfK(Objective):
    """Imitate the best of K."""

    needs = frozenset({"ref_logprobs"})  # for the KL in the metrics

    def __init__(self, config: BestOfKConfig) -> None:
        self.config = config

    def credit(self, batch: Batch) -> Batch:
        """Keep the best sample of a prompt, the first of several; of a tied one only where ties are kept."""
        best = batch.samples(batch.scores.argmax(1, keepdim=True))
        if self.config.ties is Ties.keep:
            return best
        return replace(best, signal=batch.scores.amax(1) > batch.scores.amin(1))

    def count(self, batch: Batch) -> Counts:
        """Prompts with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Minus the summed log-probs of the best responses."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        return {"policy": -logprobs.sum()}, {
            "logps/chosen": mean(logprobs.sum(-1)),
            **drift(logprobs, batch),
        }
