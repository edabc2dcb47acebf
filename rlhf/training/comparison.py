"""Win rate of the current policy against the initial policy, by the scores of two evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.core.formatting import rate

if TYPE_CHECKING:
    from rlhf.core.metrics import Row


def against_initial(scores: Sequence[float], initial: Sequence[float], tie_tolerance: float = 0.0) -> Row:
    """Return `eval/win_rate_vs_initial` with the bounds of its 95 % interval.

    The rate is the fraction of prompts whose completion scores strictly higher than the completion of the
    initial policy, plus half the fraction of ties. So an unchanged policy has a rate of 0.5. The Wilson
    interval counts every prompt as one trial, and is too wide if there are many ties.

    Args:
        scores: score of the completion of each prompt.
        initial: score of the initial policy's completion of the same prompts.
        tie_tolerance: largest relative difference of a tie, as in `rlhf.scorers.scorer`.
    """
    import torch  # here, because commands that train nothing import this module

    from rlhf.scorers.scorer import merge_ties

    now, before = merge_ties(torch.tensor([*zip(scores, initial, strict=True)]), tie_tolerance).T
    points = (now > before).sum().item() + 0.5 * (now == before).sum().item()
    return rate("eval/win_rate_vs_initial", points / len(scores), len(scores))
