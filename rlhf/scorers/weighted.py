"""A scorer that is the weighted sum of other scorers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.core.errors import RunError
from rlhf.scorers.scorer import Scorer

if TYPE_CHECKING:
    from rlhf.config.scorer import WeightedScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext


class WeightedScorer(Scorer):
    """A scorer that returns the weighted sum of the scores of other scorers, its parts.

    Args:
        config: config section of the scorer, with the sections and weights of the parts.
        context: the objects of the run that a scorer needs; `context.build` builds the parts.
    """

    config: WeightedScorerConfig

    def __init__(self, config: WeightedScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        self.parts: dict[str, Scorer] = {}
        for name, section in config.parts.items():
            part = context.build(section, f"{context.at}.parts.{name}")
            assert part is not None, "validated: every part scores"
            part.alone = False
            self.parts[name] = part

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the weighted sum [N, K] of the scores, before the missing-EOS settings are applied."""
        return self.total({name: part.score_once(rollouts) for name, part in self.parts.items()}, rollouts)

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum [N, K], and the scores [N, K] of each part by the name of the part.

        The missing-EOS settings of a part apply to its score, the settings of this section to the sum.
        """
        parts = {name: part.training_scores(rollouts)[0] for name, part in self.parts.items()}
        return self.at_end(self.total(parts, rollouts), rollouts.ended), parts

    def total(self, parts: dict[str, Tensor], rollouts: Rollouts) -> Tensor:
        """Return the weighted sum [N, K] of the scores [N, K] in `parts`; NaN: the part does not judge it.

        Raises:
            RunError: no part with a weight judges a response.
        """
        scores = torch.stack([*parts.values()])
        weights = torch.tensor([self.parts[name].config.weight for name in parts], dtype=scores.dtype)
        weights, left_out = weights.to(scores.device)[:, None, None], scores.isnan()
        without = left_out.any(0) & ~(~left_out & (weights != 0)).any(0)
        if without.any():
            where, names = rollouts.place(int(without.nonzero()[0, 0])), ", ".join(parts)
            error = RunError(
                f"{self.at} must have a part that judges each response (None leaves it to another one), got "
                f"none for {where}; return a number from one of {names}"
            )
            error.everywhere = True
            raise error
        return (weights * torch.where(left_out, 0.0, scores)).sum(0)
