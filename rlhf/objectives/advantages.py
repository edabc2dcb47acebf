"""Advantages from rewards, and whitening: pure functions of tensors.

leave one out    A_i = r_i - mean of the other K-1 rewards           Ahmadian et al., arXiv 2402.14740
group centred    A_i = (r_i - mean) / (std + 1e-4)                   Shao et al., arXiv 2402.03300
length weighted  A_i = r_i - sum_j |y_j| r_j / sum_j |y_j|           Hao et al., arXiv 2505.23585 (OPO)
decoupled        A_i = sum_k w_k (r_ki - mean_k) / (std_k + 1e-4),
                 then divided by its std over the batch + 1e-4      Liu et al., arXiv 2601.05242 (GDPO)
gae              d_t = r_t + gamma V_t+1 - V_t
                 A_t = d_t + gamma lambda A_t+1                      Schulman et al., arXiv 1506.02438
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algorithms import Scale
from rlhf.core.metrics import selected

_STD_EPS = 1e-4  # added to a standard deviation before dividing; same value as in TRL


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return each reward [N, K] minus the mean of the other K - 1 rewards of its prompt."""
    samples = rewards.shape[1]
    return centred(rewards) * (samples / (samples - 1))


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return each reward [N, K] minus the mean reward of its prompt, weighted by lengths; 0 if all are equal.

    Args:
        rewards: rewards [N, K].
        lengths: tokens [N, K] of the responses.
    """
    tied = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    mean = (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True).clamp(min=1)
    return (rewards - mean).masked_fill(tied, 0.0)


def decoupled(parts: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """Return the advantages [N, K] of GDPO; exactly 0 for a prompt where all scores of each part are equal.

    Their mean over the batch, which GDPO subtracts, is 0 because that of each prompt is.

    Args:
        parts: the scores [N, K] of each part of the reward; NaN: the part does not judge the response.
        weights: the weights [N] of each part.
    """
    total = torch.zeros_like(next(iter(parts.values())))
    for name, scores in parts.items():
        judged = ~scores.isnan()
        count = judged.sum(1, keepdim=True)
        away = (scores - scores.nanmedian(1, keepdim=True).values).nan_to_num()  # exactly 0 if all are equal
        away = (away - away.sum(1, keepdim=True) / count.clamp(min=1)) * judged
        std = away.norm(dim=1, keepdim=True) * torch.rsqrt((count - 1).clamp(min=1))
        total += weights[name][:, None] * away / (std + _STD_EPS)
    return total / (total.std() + _STD_EPS)


def scaled(advantages: Tensor, rewards: Tensor, scale: Scale) -> Tensor:
    """Return advantages [N, K], divided as `scale` selects.

    The divisor is `_STD_EPS` plus an unbiased standard deviation: with `group`, of the prompt's rewards; with
    `batch`, of all rewards. With `none` there is no divisor.
    """
    if scale is Scale.group:
        return advantages / (rewards.std(1, keepdim=True) + _STD_EPS)
    if scale is Scale.batch:
        return advantages / (rewards.std() + _STD_EPS)
    return advantages


def centred(rewards: Tensor) -> Tensor:
    """Return each reward [N, K] minus the mean reward of its prompt; exactly 0 if all K are equal."""
    tied = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return (rewards - rewards.mean(1, keepdim=True)).masked_fill(tied, 0.0)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float, states: Tensor) -> Tensor:
    """Return generalised advantage estimates [..., S], given rewards and values [..., S].

    Value and advantage after the last state are 0.

    Args:
        rewards: reward of each step.
        values: value of each state.
        gamma: discount of later rewards.
        lam: lambda of the estimate, between 0 (one step) and 1 (whole return).
        states: [..., S] bool, False at positions that are no states: they are passed over, and their
            advantage is 0.
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[..., 0])
    next_value = torch.zeros_like(next_advantage)
    for t in reversed(range(rewards.shape[-1])):
        advantage = rewards[..., t] + gamma * next_value - values[..., t] + gamma * lam * next_advantage
        here = states[..., t]
        advantages[..., t] = selected(advantage, here)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[..., t], next_value)
    return advantages


def whiten(x: Tensor, mask: Tensor, shift: bool = True, correction: int = 1) -> Tensor:
    """Return `x` scaled to unit variance over the elements where `mask` is True; 0 elsewhere.

    The divisor is sqrt(variance + 1e-8); the variance is divided by the count less `correction`. With
    `shift`, the mean becomes 0; without, the mean does not change.
    """
    count = mask.sum()
    mean = selected(x, mask).sum() / count
    variance = selected((x - mean).square(), mask).sum() / (count - correction).clamp(min=1)
    white = (x - mean) * torch.rsqrt(variance + 1e-8)
    return selected(white if shift else white + mean, mask)
