"""A scorer that has a scorer of its own for each part of a mixture of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.scorers.scorer import Scorer

if TYPE_CHECKING:
    from rlhf.config.mixture_task import MixtureScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext


class MixtureScorer(Scorer):
    """A scorer that scores the responses to the prompts of each part with the scorer of the part.

    Args:
        config: config section of the scorer, with the sections of the parts.
        context: the objects of the run that a scorer needs; `context.parts` names the parts in their order.
    """

    config: MixtureScorerConfig

    def __init__(self, config: MixtureScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        self.parts: list[Scorer] = []
        for name in context.parts:
            part = context.build(config.parts[name], f"{context.at}.parts.{name}")
            assert part is not None, "validated: every part scores"
            self.parts.append(part)

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K], before the missing-EOS settings are applied."""
        return self.by_part(rollouts, lambda scorer, own: scorer.score_once(own))

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, None]:
        """Return the scores [N, K]; the missing-EOS settings of a part apply before those of this section."""
        scores = self.by_part(rollouts, lambda scorer, own: scorer.training_scores(own)[0])
        return self.at_end(scores, rollouts.ended), None

    def by_part(self, rollouts: Rollouts, scores: Callable[[Scorer, Rollouts], Tensor]) -> Tensor:
        """Return the weighted scores [N, K]; `scores(scorer, own)` scores the rollouts of one part."""
        assert rollouts.part is not None, "validated: the task has parts, and the rollouts are not stored"
        found = torch.zeros(rollouts.response_ids.shape[:2], dtype=torch.float64)
        for number, scorer in enumerate(self.parts):
            rows = (rollouts.part == number).nonzero()[:, 0]
            if len(rows):
                own = scores(scorer, rollouts.select(rows))
                found[rows] = scorer.config.weight * own.to(found.device, found.dtype)
        return found
