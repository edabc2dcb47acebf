"""BoK: best-of-K fine-tuning, maximum likelihood of the best of K samples.

Gulcehre et al., arXiv 2308.08998; Noukhovitch et al., arXiv 2410.18252, with K = 2.

    loss = - sum_t logp(best_t)        over the tokens of the best response; divided by the number of prompts

Needs: K >= 2; reference log-probs for the KL metrics only. The loss has no penalty on the distance to the
reference.

Prompts without signal (see `rlhf.objectives.objective`): prompts whose samples all have the same score. Sum
and count exclude these prompts. With `algo.ties=keep`, every prompt has signal.
"""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.algorithms import BestOfKConfig, Ties
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, mean, selected
from rlhf.objectives.objective import Counts, Forward, Losses, Objective, drift, prompts_with_signal


class BestOfK(Objective):
    """The best-of-K objective: imitate the best of K samples."""

    needs = frozenset({"ref_logprobs"})  # for the KL in the metrics

    def __init__(self, config: BestOfKConfig) -> None:
        self.config = config

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with the best sample of each prompt; of equally good samples, the first.

        A prompt whose samples all have the same score has no signal, unless `algo.ties=keep`.
        """
        best = batch.samples(batch.scores.argmax(1, keepdim=True))
        if self.config.ties is Ties.keep:
            return best
        return replace(best, signal=batch.scores.amax(1) > batch.scores.amin(1))

    def count(self, batch: Batch) -> Counts:
        """Return the number of prompts with signal."""
        return {"policy": prompts_with_signal(batch)}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return minus the sum of the log-probs of the best responses, and metrics."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        logprobs = selected(logprobs, batch.response_mask)
        metrics = {"logps/chosen": mean(logprobs.sum(-1)), **drift(logprobs, batch)}
        return {"policy": -logprobs.sum()}, metrics
