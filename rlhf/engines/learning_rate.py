"""The learning rate of an optimizer step: warm-up, schedule, and the factor for stale samples."""

from __future__ import annotations

import math

from rlhf.config.schedule import ESSScaling, LRSchedule, OptimConfig

_ROUNDING = 1e-6  # float32 log-probs that should be equal change an effective sample size by less than this


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `steps`: warm-up, then schedule."""
    warmup = config.warmup if config.warmup >= 1 or config.warmup == 0 else config.warmup * steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1.0, steps - warmup))
    if config.schedule is LRSchedule.linear:
        return config.lr * (1 - done)
    if config.schedule is LRSchedule.cosine:
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr


def ess_scale(config: OptimConfig, ess: float | None) -> float:
    """Return the factor of the learning rate of one optimizer step, after VCPO (arXiv 2602.17616).

    Args:
        config: the rule `ess_scaling` and the on-policy share `ess_on_policy`.
        ess: `mismatch/step_ess` of the minibatch: effective sample size of its responses over their number.
    """
    assert ess is not None, "at least one response is trained on, so there is a sample size"
    share = ess / config.ess_on_policy
    if not share < 1 - _ROUNDING:
        return 1.0
    return share if config.ess_scaling is ESSScaling.linear else math.sqrt(share)
