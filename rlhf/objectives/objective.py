"""What an algorithm is to the rest: three pure functions and a list of needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.core.batch import Batch, Outputs
from rlhf.core.metrics import largest, mean, sample_size

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics


Forward = Callable[[Batch], Outputs]  # the module that is trained, on a micro-batch


Losses = dict[str, Tensor]  # sums over a micro-batch (scalar, differentiable), by the name behind "loss/"


Counts = dict[str, float]  # their denominators


NEEDS = {
    "ref_logprobs": "log-probs of the frozen reference",
    "old_logprobs": "log-probs of the trainer before this update; absent in an on-policy batch of one step, "
    "where behaviour_logprobs are the same",
    "ratio": "old_logprobs for ratios in the loss; absent where one step follows, whose forward gives them",
    "values": "values of a value model",
}


MAX_LOG_WEIGHT = 20.0  # of an importance weight: its square still fits float32


class Objective(ABC):
    """A learning objective. It knows tensors and its own settings; no device, rank, generator or backend."""

    needs: frozenset[str] = frozenset()  # what annotate fills in, of the names in NEEDS
    kl_coef: float = 0.0  # weight of the KL penalty, for the reward metrics
    loss_weights: Mapping[str, float] = MappingProxyType({})  # in what is minimised; 1 where not named

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
    def count(self, batch: Batch) -> Counts:
        """The denominators of the losses over a minibatch; the engine adds up over ranks and divides once."""

    @abstractmethod
    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """The SUM of each loss over a micro-batch, and figures."""

    def state_dict(self) -> dict[str, float]:
        """What credit carries from one batch to the next; most carry nothing."""
        return {}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Go on from `saved`."""
        assert not saved, "an objective that keeps a state takes it back"


class Supervised(Objective):
    """An objective on stored completions, which nobody scores."""

    def describe(self, batch: Batch) -> Metrics:
        """What the stored completions are like."""
        return {
            "objective/eos_rate": mean(batch.ended.float()),
            "objective/response_tokens": mean(batch.response_mask.sum(-1).float()),
        }


def prompts_with_signal(batch: Batch) -> float:
    """How many prompts of a batch are trained on."""
    return float(len(batch) if batch.signal is None else batch.signal.sum())


def drift(logprobs: Tensor, batch: Batch, clip: float = 0.2) -> Metrics:
    """How far the policy being trained ([N, K, T] log-probs) is from the one that sampled, per token, for an
    objective that takes no ratio of its own: `mismatch`, the ratio, and how often it is beyond `clip`.
    """
    if batch.behaviour_logprobs is None:
        return {}
    ratio = (logprobs.detach() - before(batch)).exp()
    return {
        **mismatch(logprobs, batch),
        "policy/ratio": mean(ratio, batch.response_mask),
        "policy/clipfrac": mean((ratio - 1).abs() > clip, batch.response_mask),
    }


def before(batch: Batch) -> Tensor:
    """The log-probs [N, K, T] that the policy is compared with: of the trainer just before this update where
    that was asked for, else of the sampler, so at the first step of an on-policy run the ratio is 1 only if
    sampler and trainer agree.
    """
    found = batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert found is not None
    return found


def mismatch(logprobs: Tensor, batch: Batch) -> Metrics:
    """`policy/approxkl` since `before`; and the trainer (before the update where known) against the sampler:
    k3 estimate of KL(sampler || trainer), largest ratio, and effective sample size of the importance weights
    trainer / sampler as a part of the tokens (1: on-policy).
    """
    assert batch.behaviour_logprobs is not None
    mask, now = batch.response_mask, logprobs.detach()
    lag = (now if batch.old_logprobs is None else batch.old_logprobs) - batch.behaviour_logprobs
    return {
        "policy/approxkl": mean(0.5 * (now - before(batch)).square(), mask),
        "mismatch/kl": mean(torch.expm1(lag) - lag, mask),
        "mismatch/max_ratio": largest(lag.abs().exp(), mask),
        "mismatch/ess": sample_size(lag.clamp(max=MAX_LOG_WEIGHT).exp(), mask),
    }
