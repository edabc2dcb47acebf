"""The interface of a learning objective: credit, count, loss, and names of the tensors that these need.

    credit(batch)          once per rollout batch, without gradient: advantages, or the samples to compare
    count(batch)           denominators of the losses over a minibatch
    loss(forward, batch)   the SUM of each loss over a micro-batch, and metrics

The engine divides each sum by its count over the minibatch. Shapes: N prompts, K samples of a prompt, T
response tokens.

Prompts without signal are the prompts on which an objective does not train, usually because their samples
cannot be distinguished by score. `credit` marks these prompts with False in `Batch.signal`. The engine skips
their forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rlhf.core.batch import Batch, Outputs
from rlhf.core.metrics import Metrics, Stat, largest, mean, sample_size, selected

Forward = Callable[[Batch], Outputs]  # runs the trained module on a micro-batch
Losses = dict[str, Tensor]  # sums over a micro-batch (differentiable scalars); key: metric without "loss/"
Counts = dict[str, float]  # denominators of the losses, with the keys of `Losses`

NEEDS = {
    "ref_logprobs": "log-probs of the frozen reference",
    "old_logprobs": "log-probs of the trainer before this update; not computed for an on-policy batch with "
    "one optimizer step, where behaviour_logprobs are the same",
    "ratio": "old_logprobs, for a ratio in the loss; skipped when the batch gets one optimizer step: the "
    "training forward yields them",
    "correction": "old_logprobs for weights and limits that `credit` computes; not computed for an "
    "on-policy batch with one optimizer step whose sampler computes the same log-probs as the trainer",
    "values": "values of a value model",
    "entropy": "entropy of the next-token distribution, in the outputs of the training forward",
    "log_sum_squares": "log of the sum of the squared next-token probabilities, in the outputs of the "
    "training forward",
    "divergence": "divergence from the next-token distribution of the reference, in the outputs of the "
    "training forward",
}

_ROUNDING = 1e-6  # relative rounding error of sums of float32 log-probs, which batching changes
MAX_LOG_WEIGHT = 20.0  # bound of the log of a weight or a ratio: the square of the ratio fits float32
_MIN_LOG_WEIGHT = -300.0  # lower bound of a response's log weight: the square of the weight fits float64


class Objective(ABC):
    """A learning objective: pure functions of tensors and settings, without device, ranks or backend."""

    needs: frozenset[str] = frozenset()  # names from NEEDS
    kl_coef: float = 0.0  # weight of the KL penalty, for the reward metrics
    loss_weights: Mapping[str, float] = MappingProxyType({})  # weights in the total loss; missing: 1
    shows_loss: bool = True  # False: the value of the policy loss, near 0 by construction, is not shown

    def describe(self, batch: Batch) -> Metrics:
        """Return the `objective/` metrics of an annotated rollout batch, before credit.

        KL and entropy are estimated for the policy that sampled, on its own samples, and summed over the
        tokens of a response.
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
            figures[f"objective/scores/{name}"] = mean(part, ~part.isnan())
        if batch.member_spread is not None:
            figures["objective/score_std"] = mean(batch.member_spread)
        if batch.environment_mask is not None:
            figures["environment/token_share"] = mean(
                batch.environment_mask.sum(-1) / batch.real.sum(-1).clamp(min=1)
            )
        for name, part in (batch.episode or {}).items():
            if name != "seconds":  # a time; the recorder adds it up
                figures[f"environment/{name}"] = mean(part)
        if batch.behaviour_logprobs is not None:
            figures["objective/entropy"] = mean(
                -selected(batch.behaviour_logprobs, batch.response_mask).sum(-1)
            )
            if batch.ref_logprobs is not None:
                kl = selected(batch.behaviour_logprobs - batch.ref_logprobs, batch.response_mask).sum(-1)
                figures["objective/kl"] = mean(kl)
                figures["objective/non_score_reward"] = mean(-self.kl_coef * kl)
                figures["objective/rlhf_reward"] = mean(batch.scores - self.kl_coef * kl)
        return figures

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages, or with the samples to compare; no gradients are computed.

        The training loop calls `credit` once per rollout batch. In the result, `signal` [N] is False for
        prompts that are not trained on; `signal` is None if all prompts are trained on. By default the batch
        is unchanged, for a loss that needs nothing but scores or texts.
        """
        return batch

    @abstractmethod
    def count(self, batch: Batch) -> Counts:
        """Return the denominators of the losses over a minibatch.

        Every rank has the whole minibatch, so all ranks compute the same counts.
        """

    def observe(self, batch: Batch) -> Metrics:
        """Return the metrics of a minibatch without a forward pass; they cover prompts without signal, too.

        They replace those that `loss` returns under the same names, which cover prompts with signal only.
        """
        if batch.old_logprobs is None or batch.behaviour_logprobs is None:
            return {}
        return _between(batch.old_logprobs, batch)

    @abstractmethod
    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the SUM (not the mean) of each loss over a micro-batch, and metrics."""

    def state_dict(self) -> dict[str, float]:
        """Return the numbers that `credit` carries from batch to batch; empty for most objectives."""
        return {}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        assert not saved, "an objective with a state must override load_state_dict"


class Supervised(Objective):
    """An objective on stored completions; its metrics do not include scores."""

    def describe(self, batch: Batch) -> Metrics:
        """Return the mean length of the stored completions and the fraction with an end token."""
        return {
            "objective/eos_rate": mean(batch.ended.float()),
            "objective/response_tokens": mean(batch.response_mask.sum(-1).float()),
        }


def preferred(margins: Tensor, sizes: Tensor) -> Stat:
    """Return the share of pairs whose chosen response is preferred; a margin within rounding counts as half.

    Args:
        margins: reward [N] of the chosen response minus the reward of the rejected response.
        sizes: sum [N] of the magnitudes of the float32 numbers whose differences a margin is.
    """
    sign = margins.detach().sign() * (margins.detach().abs() > _ROUNDING * sizes.detach())
    return mean(0.5 * (sign + 1))


def prompts_with_signal(batch: Batch) -> float:
    """Return the number of prompts of a batch that are trained on."""
    return float(len(batch) if batch.signal is None else batch.signal.sum())


def drift(logprobs: Tensor, batch: Batch, clip: float = 0.2) -> Metrics:
    """Return metrics of the distance between the trained policy and the policy that sampled, per token.

    This function is for objectives without a ratio in the loss. The metrics are those of `mismatch`, the mean
    ratio, and the fraction of tokens whose ratio differs from 1 by more than `clip`. Without
    `behaviour_logprobs` the result is empty.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch.
        clip: bound for `policy/clipfrac`.
    """
    if batch.behaviour_logprobs is None:
        return {}
    ratio = bounded(logprobs.detach() - old_or_behaviour(batch)).exp()
    return {
        **mismatch(logprobs, batch),
        "policy/ratio": mean(ratio, batch.response_mask),
        "policy/clipfrac": mean((ratio - 1).abs() > clip, batch.response_mask),
    }


def old_or_behaviour(batch: Batch) -> Tensor:
    """Return `old_logprobs` [N, K, T], or `behaviour_logprobs` if `old_logprobs` were not computed.

    `old_logprobs` come from the trainer before this update, `behaviour_logprobs` from the sampler. With
    `behaviour_logprobs`, the first ratio of an on-policy run is 1 only if sampler and trainer compute the
    same log-probs.
    """
    logprobs = batch.behaviour_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert logprobs is not None
    return logprobs


def before_update(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return the log-probs [N, K, T] of the trainer just before the update, without gradient.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch; without `old_logprobs`, the policy has not changed since the update began.
    """
    return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def sampler_logprobs(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return the log-probs [N, K, T] of the policy that sampled, without gradient.

    For a batch with `on_policy`, these are those of `before_update`. Otherwise the rounding of the sampler
    would change weights and masks, and an on-policy run with a correction would differ from the run without
    it.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch.
    """
    if batch.on_policy:
        return before_update(logprobs, batch)
    assert batch.behaviour_logprobs is not None
    return batch.behaviour_logprobs


def mismatch(logprobs: Tensor, batch: Batch) -> Metrics:
    """Return `policy/approxkl` and the `mismatch/` metrics between trainer and sampler.

    `policy/approxkl` compares `logprobs` [N, K, T] with `old_or_behaviour`. The metrics of `_between` compare
    the trainer (before the update, if `old_logprobs` exist) with the sampler. `mismatch/step_ess` is
    `mismatch/ess` of the policy that is trained in this step, from `logprobs` (VCPO, arXiv 2602.17616).
    """
    assert batch.behaviour_logprobs is not None
    mask, now = batch.response_mask, logprobs.detach()
    return {
        "policy/approxkl": mean(0.5 * (now - old_or_behaviour(batch)).square(), mask),
        **_between(before_update(now, batch), batch),
        "mismatch/step_ess": sample_size(response_weights(now - batch.behaviour_logprobs, mask)),
    }


def _between(trainer: Tensor, batch: Batch) -> Metrics:
    """Return the `mismatch/` metrics between log-probs [N, K, T] of the trainer and those of the sampler.

    - `kl`: the k3 estimate of KL(sampler || trainer);
    - `max_ratio`: the largest ratio of a token;
    - `ess`: the effective sample size of the weights trainer / sampler of responses, as a fraction of the
      responses; `token_ess`: the same of tokens. Both are 1 on-policy.
    """
    assert batch.behaviour_logprobs is not None
    mask, lag = batch.response_mask, trainer - batch.behaviour_logprobs
    high = bounded(lag)
    return {
        "mismatch/kl": mean(torch.expm1(high) - lag, mask),
        "mismatch/max_ratio": largest(bounded(lag.abs()).exp(), mask),
        "mismatch/ess": sample_size(response_weights(lag, mask)),
        "mismatch/token_ess": sample_size(high.exp(), mask),
    }


def response_weights(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return the importance weights [N, K] of responses (float64), given log-ratios [N, K, T] of tokens.

    The logarithm of a weight is limited to the range from `_MIN_LOG_WEIGHT` to `MAX_LOG_WEIGHT`.
    """
    return selected(log_ratios.double(), mask).sum(-1).clamp(_MIN_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios of at most `MAX_LOG_WEIGHT`, whose exponential and its gradient are finite."""
    return log_ratio.masked_fill(log_ratio > MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
