"""What an algorithm is to the rest: three pure functions and a list of needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from rlhf.batch import Batch
from rlhf.metrics import Metrics, largest, mean
from rlhf.models import Outputs

Forward = Callable[[Batch], Outputs]  # the module that is trained, on a micro-batch


class Objective(ABC):
    """A learning objective. It knows tensors and its own settings; no device, rank, generator or backend."""

    needs: ClassVar[frozenset[str]] = (
        frozenset()
    )  # of ref_logprobs, old_logprobs, values: what annotate fills in
    kl_coef: float = 0.0  # weight of the KL penalty, for the reward metrics

    def describe(self, batch: Batch) -> Metrics:
        """What sampling, scoring and annotation gave, before credit: the `objective/` metrics.

        KL and entropy are those of the policy that sampled, estimated on its own samples, summed over a
        response.
        """
        spread = batch.scores.amax(1) - batch.scores.amin(1)
        figures = {
            "objective/scores": mean(batch.scores),
            "objective/scores_margin": mean(spread),
            "objective/tie_rate": mean((spread == 0).float()),
            "objective/eos_rate": mean(batch.ended.float()),
            "objective/response_tokens": mean(batch.response_mask.sum(-1).float()),
        }
        for name, part in (batch.parts or {}).items():
            figures[f"objective/scores/{name}"] = mean(part)
        if batch.behaviour_logprobs is not None:
            figures["objective/entropy"] = mean(-batch.behaviour_logprobs.sum(-1))
            if batch.ref_logprobs is not None:
                kl = (batch.behaviour_logprobs - batch.ref_logprobs).sum(-1)
                figures["objective/kl"] = mean(kl)
                figures["objective/non_score_reward"] = mean(-self.kl_coef * kl)
                figures["objective/rlhf_reward"] = mean(batch.scores - self.kl_coef * kl)
        return figures

    @abstractmethod
    def credit(self, batch: Batch) -> Batch:
        """Assign credit once for a rollout batch, without gradient: advantages, or the samples that are
        compared.
        """

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """The denominator of the loss over `batch`; the engine adds it up over ranks and divides once."""

    @abstractmethod
    def loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, Metrics]:
        """The SUM of the loss over a micro-batch (scalar, differentiable), and its figures."""


class Supervised(Objective):
    """An objective on stored completions, which nobody scores."""

    def describe(self, batch: Batch) -> Metrics:
        """What the stored completions are like."""
        return {
            "objective/eos_rate": mean(batch.ended.float()),
            "objective/response_tokens": mean(batch.response_mask.sum(-1).float()),
        }


def drift(logprobs: Tensor, batch: Batch, clip: float = 0.2) -> Metrics:
    """How far the policy being trained ([N, K, T] log-probs) is from the one that sampled, per token.

    `policy/*` compares with the trainer just before this update where that was asked for, else with the
    sampler, so at the first step of an on-policy run the ratio is 1 only if sampler and trainer agree.
    `mismatch/*` compares the trainer (before the update where known) with the sampler: k3 estimate of
    KL(sampler || trainer) and largest ratio.
    """
    if batch.behaviour_logprobs is None:
        return {}
    mask, now = batch.response_mask, logprobs.detach()
    since = now - (batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs)
    lag = (now if batch.old_logprobs is None else batch.old_logprobs) - batch.behaviour_logprobs
    return {
        "policy/ratio": mean(since.exp(), mask),
        "policy/approxkl": mean(0.5 * since.square(), mask),
        "policy/clipfrac": mean((since.exp() - 1).abs() > clip, mask),
        "mismatch/kl": mean(torch.expm1(lag) - lag, mask),
        "mismatch/max_ratio": largest(lag.abs().exp(), mask),
    }
