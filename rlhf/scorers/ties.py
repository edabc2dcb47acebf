"""Ties between scores that differ only by rounding: pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_ties(scores: Tensor, tolerance: float) -> Tensor:
    """Return the scores [N, K], float32, in which scores that tie with the best or worst of a row equal it.

    Two scores a and b tie if |a - b| <= tolerance * max(1, |a|, |b|). Best and worst decide preference pairs,
    best-of-K, win rates and whether a prompt has a signal. Other scores do not change, and no score changes
    by more than the tolerance. If best and worst tie, all scores of the row become equal to the best.

    Args:
        scores: scores [N, K] that are compared within a row; rounded to float32 before.
        tolerance: largest relative difference of a tie; 0: only equal scores tie.
    """
    scores = scores.float()

    def tied(extreme: Tensor) -> Tensor:
        scale = torch.maximum(scores.abs(), extreme.abs()).clamp(min=1)
        return (scores - extreme).abs() <= tolerance * scale

    best = scores.amax(1, keepdim=True)
    scores = torch.where(tied(best), best, scores)
    worst = scores.amin(1, keepdim=True)
    return torch.where(tied(worst), worst, scores)
