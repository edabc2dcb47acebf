"""Off-policy correction: importance weights of the terms of a policy-gradient loss, and rejection.

    w = exp(old - behaviour)        log-probs of the trainer just before this update, and of the sampler

w differs from 1 because of lag, or because sampler and trainer compute with different numerics.

Weights (`algo.correction.kind`) multiply the loss of a token; they carry no gradient:

| kind        | weight                       | source                                            |
|-------------|------------------------------|---------------------------------------------------|
| `none`      | 1                            | Noukhovitch et al., arXiv 2410.18252              |
| `truncate`  | min(max(w, floor), cap)      | Espeholt et al., arXiv 1802.01561                 |
| `mask`      | w within [low, high], else 0 | Ling Team, arXiv 2510.18855                       |
| `decoupled` | w                            | Hilton et al., 2110.00641; Fu et al., 2505.24298  |

w is computed per token, or for a response from the sum (`sequence`) or the mean (`geometric`) of its log w
(`algo.correction.level`). With `algo.correction.normalise`, the weights of a rollout batch are divided by
their mean, before rejection. The clipped ratio of the loss is relative to `old`, so `decoupled` with token
weights is decoupled PPO. With another `algo.anchor` than `old`, the anchor takes the place of `old` in w.

Rejection (`algo.correction.reject`) leaves tokens out of the sum and of the count of the loss. The value of a
token is k1 = -log w, k2 = (log w)^2 / 2 or k3 = w - 1 - log w (Schulman 2020). A token or a response is kept
if its value is within the bounds:

| reject        | unit     | value                                                                           |
|---------------|----------|---------------------------------------------------------------------------------|
| `token`       | token    | its own                                                                         |
| `sum`, `mean` | response | the sum or the mean over its tokens                                             |
| `max`         | response | each of its tokens must be within the bounds                                    |
| `m2`          | token    | the tokens of largest k2, until the mean of (log w)^2 is below the limit; the   |
|               |          | mask of M2PO (Zheng et al., arXiv 2510.01161) as AReaL implements it            |

The bounds of k1 are bounds of w. `algo.correction.veto` also rejects each response with a token whose k3 is
larger, as the presets of verl do. Rejection and weights are independent of each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf.config.algorithms import CorrectionConfig, CorrectionKind, Divergence, Level, Reject
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, mean, selected
from rlhf.objectives.objective import MAX_LOG_WEIGHT, old_or_behaviour, sampler_logprobs


def importance_weights(
    old: Tensor, behaviour: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Metrics]:
    """Return the importance weights of a micro-batch, and `correction/` metrics.

    Args:
        old: log-probs [N, K, T] of the trainer before this update, or of another anchor, without gradient.
        behaviour: log-probs [N, K, T] of the sampler.
        mask: response mask [N, K, T] bool.
        config: kind, level and bounds of the correction.

    Returns:
        Weights [N, K, T] of tokens, or [N, K, 1] of responses and for kind `none`. The metrics are the
        fraction of truncated weights (`truncate`), the fraction of masked weights (`mask`), the mean weight
        (`decoupled`), or empty (`none`).
    """
    if config.kind is CorrectionKind.none:
        return torch.ones_like(old[..., :1]), {}
    log_weight = selected(old - behaviour, mask)
    if config.level is not Level.token:
        log_weight = over_tokens(log_weight, mask, config.level is Level.geometric)
        mask = torch.ones_like(log_weight, dtype=torch.bool)
    raw = log_weight.clamp(max=MAX_LOG_WEIGHT).exp()
    if config.kind is CorrectionKind.truncate:
        outside = (raw > config.cap) | (raw < config.floor)
        return raw.clamp(config.floor, config.cap), {"correction/truncated": mean(outside, mask)}
    if config.kind is CorrectionKind.mask:
        kept = (raw >= config.low) & (raw <= config.high)
        return raw * kept, {"correction/masked": mean(~kept, mask)}
    return raw, {"correction/weight": mean(raw, mask)}


def corrected(batch: Batch, config: CorrectionConfig) -> Batch:
    """Return the rollout batch with weights and rejection that depend on the whole batch.

    `per_token` gets `weights` [N, K, T] float32 and `trained` [N, K, T] bool, False for the rejected tokens
    that leave sum and count. Prompts without a trained token lose their signal.

    Args:
        batch: a rollout batch with advantages; without `old_logprobs`, sampler and trainer are the same.
        config: the correction, with `config.coupled`.
    """
    mask, old = batch.response_mask, old_or_behaviour(batch)
    behaviour = sampler_logprobs(old, batch)
    found = of_tokens(old, behaviour, mask, config)
    some = found["trained"].flatten(1).any(1)
    return replace(
        batch,
        signal=some if batch.signal is None else batch.signal & some,
        per_token={**(batch.per_token or {}), **found},
    )


def of_tokens(old: Tensor, behaviour: Tensor, mask: Tensor, config: CorrectionConfig) -> dict[str, Tensor]:
    """Return `weights`, `trained` and `kept` of tokens, each [..., T]; see `corrected`.

    Args:
        old, behaviour: log-probs of trainer and sampler [..., T].
        mask: response mask [..., T] bool.
        config: the correction.
    """
    weights = importance_weights(old, behaviour, mask, config)[0].expand(mask.shape)
    kept = mask & accepted(selected(old - behaviour, mask), mask, config)
    if config.normalise and config.kind is not CorrectionKind.none:
        weights = weights / _mean_weight(weights, mask, config.level)
    return {"weights": weights * kept, "trained": mask if config.reject_counted else kept, "kept": kept}


def _mean_weight(weights: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the mean of the weights [N, K, T]: over the tokens of `mask`, or over responses with tokens."""
    if level is Level.token:
        return selected(weights, mask).sum() / mask.sum().clamp(min=1)
    responses = mask.any(-1)
    return selected(weights[..., 0], responses).sum() / responses.sum().clamp(min=1)


def accepted(lag: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    """Return True for the tokens that are not rejected, [N, K, T] bool.

    Args:
        lag: log w [N, K, T], 0 where `mask` is False.
        mask: response mask [N, K, T] bool.
        config: the rejection.
    """
    k3 = torch.expm1(lag.clamp(max=MAX_LOG_WEIGHT)) - lag
    kept = mask if config.veto is None else mask & ((k3 <= config.veto) | ~mask).all(-1, keepdim=True)
    if config.reject is None:
        return kept
    if config.reject is Reject.m2:
        squares = lag.square()
        return kept & (squares < largest_kept(squares, mask, config.reject_limit, strictly=True))
    value = 0.5 * lag.square() if config.reject_by is Divergence.k2 else k3
    if config.reject_by is Divergence.k1:
        value = lag.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    if config.reject in (Reject.sum, Reject.mean):
        value = over_tokens(value, mask, config.reject is Reject.mean)
    if config.reject_by is Divergence.k1:
        ratio, high = value.exp(), torch.inf if config.reject_high is None else config.reject_high
        within = (ratio >= config.reject_low) & (ratio <= high)
    else:
        within = value <= config.reject_limit
    if config.reject is Reject.max:
        within = (within | ~mask).all(-1, keepdim=True)
    return kept & within


def over_tokens(values: Tensor, mask: Tensor, averaged: bool) -> Tensor:
    """Return the sum of values [N, K, T], 0 outside the mask, over the tokens of a response, or the mean."""
    total = values.sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1) if averaged else total


def largest_kept(squares: Tensor, region: Tensor, limit: float, strictly: bool = False) -> Tensor:
    """Return the bound below which squared log-ratios are kept so that their mean is at most `limit`.

    The largest squares are left out one after the other until the mean of the others is at most `limit`, or
    below it with `strictly`. One element always stays. The result is a scalar, infinite if all are kept.

    Args:
        squares: squared log-ratios, of any shape.
        region: True for the elements that count, bool of the same shape.
        limit: bound of the mean.
        strictly: whether the mean must be below the limit.
    """
    ordered = squares[region].double().sort().values
    if not len(ordered):
        return squares.new_tensor(torch.inf)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    fits = means < limit if strictly else means <= limit
    count = max(1, int(fits.sum()))  # the means of sorted numbers never fall
    return ordered[count].to(squares.dtype) if count < len(ordered) else squares.new_tensor(torch.inf)


def clip_bound(squares: Tensor, limit: float) -> Tensor:
    """Return the largest element c of `squares` [R] for which the mean of min(square, c) is at most `limit`.

    The result is a scalar; it is infinite if the mean of all squares is at most the limit, and 0 if no
    element is small enough.
    """
    ordered = squares.double().sort().values
    if not len(ordered) or ordered.mean() <= limit:
        return squares.new_tensor(torch.inf)
    above = torch.arange(len(ordered) - 1, -1, -1, device=ordered.device)
    means = (ordered.cumsum(0) + above * ordered) / len(ordered)  # of min(square, c), for each element c
    fits = int((means <= limit).sum())
    return ordered[fits - 1].to(squares.dtype) if fits else squares.new_tensor(0.0)
