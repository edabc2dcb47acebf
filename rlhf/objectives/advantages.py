"""From rewards to advantages: pure functions of tensors.

leave one out    A_i = r_i - mean of the other K-1                   Ahmadian et al., arXiv 2402.14740
group centred    A_i = (r_i - mean) / (std + 1e-4)                   Shao et al., arXiv 2402.03300
gae              d_t = r_t + gamma V_t+1 - V_t
                 A_t = d_t + gamma lambda A_t+1                      Schulman et al., arXiv 1506.02438
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algo import KLEstimator, Scale

STD_EPS = 1e-4  # of a group's standard deviation; that of TRL


def leave_one_out(rewards: Tensor) -> Tensor:
    """Each reward [N, K] minus the mean of the other K - 1 of its prompt."""
    samples = rewards.shape[1]
    return centred(rewards) * (samples / (samples - 1))


def group_centred(rewards: Tensor, scale: Scale) -> Tensor:
    """Each reward [N, K] minus the mean of its prompt's K, over an unbiased standard deviation or not."""
    if scale is Scale.group:
        return centred(rewards) / (rewards.std(1, keepdim=True) + STD_EPS)
    if scale is Scale.batch:
        return centred(rewards) / (rewards.std() + STD_EPS)
    return centred(rewards)


def centred(rewards: Tensor) -> Tensor:
    """Each reward [N, K] minus the mean of its prompt's K; exactly 0 where all K are equal."""
    tied = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return (rewards - rewards.mean(1, keepdim=True)).masked_fill(tied, 0.0)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates of rewards and values, all [..., S]; 0 after the last state."""
    advantages = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[..., 0])  # the advantage of the next state
    value = torch.zeros_like(following)  # its value
    for t in reversed(range(rewards.shape[-1])):
        following = rewards[..., t] + gamma * value - values[..., t] + gamma * lam * following
        advantages[..., t] = following
        value = values[..., t]
    return advantages


def whiten(x: Tensor, mask: Tensor, shift: bool = True) -> Tensor:
    """`x` at unit variance (unbiased, + 1e-8) where `mask` is True, and mean 0 or, without `shift`, its own;
    0 elsewhere.
    """
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    white = (x - mean) * torch.rsqrt(variance + 1e-8)
    return (white if shift else white + mean) * mask


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL to the reference at each token, from samples of the policy (Schulman 2020, "Approximating KL
    divergence"): k1 = logp - ref, k3 = exp(-k1) - 1 + k1.
    """
    k1 = logprobs - ref_logprobs
    return k1 if estimator is KLEstimator.k1 else torch.expm1(-k1) + k1
