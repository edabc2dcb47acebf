"""Several scorers as one: the weighted sum of what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.scorers.scorer import Scorer

if TYPE_CHECKING:
    from rlhf.config.scorer import WeightedScorerConfig
    from rlhf.core.batch import Rollouts


class WeightedScorer(Scorer):
    """Adds up the scores of its parts, each times its weight.

    Args:
        config: its settings, and the weight of each part.
        parts: scorers by name.
    """

    def __init__(self, config: WeightedScorerConfig, parts: dict[str, Scorer]) -> None:
        super().__init__(config)
        self.parts = parts

    def score(self, rollouts: Rollouts) -> Tensor:
        """The weighted sum [N, K] of the scores as the parts give them."""
        return self.total({name: part.score(rollouts) for name, part in self.parts.items()})

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the parts and their scores, [N, K] each, a missing end accounted for in both."""
        parts = {name: part.training_scores(rollouts)[0] for name, part in self.parts.items()}
        return self.at_end(self.total(parts), rollouts.ended), parts

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """The weighted sum [N, K] of scores by part."""
        return torch.stack([self.parts[name].config.weight * scores for name, scores in parts.items()]).sum(0)
