"""The order in which a run draws its training examples, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhf.core.metrics import How, Stat
from rlhf.tasks.mixture import figures_of_parts

if TYPE_CHECKING:
    from rlhf.core.batch import Batch, Prompts
    from rlhf.core.metrics import Metrics

_SOLVED = "prompts/solved"  # metric


class Examples(Protocol):
    """The training examples of a task."""

    prompts_per_update: int

    def __len__(self) -> int:
        """Return the number of examples."""

    def order(self, epoch: int) -> np.ndarray:
        """Return the positions of all examples in the order of an epoch."""

    def rows(self) -> np.ndarray:
        """Return the row in the data set (`Prompts.index`) of each example."""

    def batch(self, positions: list[int]) -> Prompts:
        """Return the examples at `positions`."""


class PromptOrder:
    """An endless iterator over the training batches of a task.

    Seed and epoch determine the order of the examples in an epoch; a batch may span two epochs. With
    `solved_at`, an epoch leaves out the examples that were solved when its first batch was drawn: the
    "no-positive-resampling" of ScaleRL (Khatri et al., arXiv 2510.13786). An example is solved if the mean
    score of its samples was at least `solved_at` when they were last scored. If all examples are solved, none
    is left out.

    Args:
        task: the data.
        solved_at: mean score from which on an example is solved; None: no example is left out.
        start: number of the first batch, counted from 0.
        parts: names of the parts of a mixture, for metrics of each part.
    """

    def __init__(
        self,
        task: Examples,
        solved_at: float | None = None,
        start: int = 0,
        parts: Sequence[str] = (),
    ) -> None:
        self.task = task
        self.parts = parts
        self.solved_at = solved_at
        self.solved: set[int] = set()  # examples as rows of the data set, like `Prompts.index`
        self.seek(start)

    def seek(self, number: int) -> None:
        """Continue with batch `number`, given that no example was left out before."""
        epoch, place = divmod(number * self.task.prompts_per_update, len(self.task))
        self.enter(epoch, place, frozenset())

    def enter(self, epoch: int, place: int, left_out: frozenset[int]) -> None:
        """Continue at position `place` of an epoch that leaves out the examples `left_out`."""
        self.epoch, self.place, self.left_out = epoch, place, left_out
        self.order = self.task.order(epoch)  # positions in the tokenized training split
        if left_out:
            kept = ~np.isin(self.task.rows()[self.order], list(left_out))
            self.order = self.order[kept] if kept.any() else self.order

    def __iter__(self) -> Iterator[Prompts]:
        return self

    def __next__(self) -> Prompts:
        """Return the next batch of N examples."""
        size, drawn = self.task.prompts_per_update, []  # type: int, list[int]
        while len(drawn) < size:
            if self.place == len(self.order):
                self.enter(self.epoch + 1, 0, frozenset(self.solved))
            part = self.order[self.place : self.place + size - len(drawn)].tolist()
            self.place += len(part)
            drawn += part
        return self.task.batch(drawn)

    def scored(self, batch: Batch) -> Metrics:
        """Note which examples of a scored batch are solved.

        Returns:
            The share of solved examples, if `solved_at` is set, and the metrics of each part of a mixture.
        """
        figures = figures_of_parts(batch, self.parts)
        if self.solved_at is None:
            return figures
        solved = batch.scores.mean(1) >= self.solved_at
        self.solved.difference_update(batch.index.tolist())
        self.solved.update(batch.index[solved].tolist())
        return figures | {_SOLVED: Stat(len(self.solved) / len(self.task), 1.0, How.last)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the solved examples, as JSON values."""
        return {
            "epoch": self.epoch,
            "place": self.place,
            "left_out": sorted(self.left_out),
            "solved": sorted(self.solved),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.solved = set(saved["solved"])
        self.enter(saved["epoch"], saved["place"], frozenset(saved["left_out"]))
