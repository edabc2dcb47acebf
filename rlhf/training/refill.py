"""Other prompts in place of groups without signal: dynamic sampling of DAPO (Yu et al., arXiv 2503.14476).

A group has no signal if the scores of its K samples tie. A stream scores a group before the trainer gets it,
and samples a further prompt for each group without signal, until B groups of a batch have signal or
`Refill.most` groups were replaced. Then groups without signal are trained like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rlhf.core.batch import Batch, Rollouts
from rlhf.core.metrics import How, Metrics, Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """The rule which groups are replaced."""

    most: int  # groups that are replaced for a batch, at most
    scorer: Callable[[Rollouts], Batch]  # rollouts that have scores are returned unchanged
    note: Callable[[Batch], object]  # gets every scored batch: the order of prompts knows the solved prompts

    def score(self, rollouts: Rollouts) -> tuple[Batch, Tensor]:
        """Return the rollouts with scores, and whether each group has signal, [N] bool."""
        batch = self.scorer(rollouts)
        self.note(batch)
        return batch, _signal(batch.scores)

    def figures(self, scores: Tensor, replaced: int) -> Metrics:
        """Return the metrics of an update.

        Args:
            scores: scores [N, K] of the batch.
            replaced: groups that were replaced since the last update.
        """
        left = float((~_signal(scores)).sum())
        return {
            "rollouts/refilled": Stat(float(replaced), 1.0, How.sum),
            "rollouts/refilled_share": Stat(float(replaced), replaced + left),
            "rollouts/no_signal": Stat(left, 1.0, How.sum),
        }


def _signal(scores: Tensor) -> Tensor:
    return scores.amax(1) > scores.amin(1)
