"""A scorer that is the weighted sum of other scorers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
            self.parts[name] = part

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the weighted sum [N, K] of the scores, before the missing-EOS settings are applied."""
        return self.total({name: part.score_once(rollouts) for name, part in self.parts.items()})

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum [N, K], and the scores [N, K] of each part by the name of the part.

        The missing-EOS settings of a part apply to its score, the settings of this section to the sum.
        """
        parts = {name: part.training_scores(rollouts)[0] for name, part in self.parts.items()}
        return self.at_end(self.total(parts), rollouts.ended), parts

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum [N, K] of the scores [N, K] in `parts`."""
        return torch.stack([self.parts[name].config.weight * scores for name, scores in parts.items()]).sum(0)
