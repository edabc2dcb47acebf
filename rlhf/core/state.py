"""Progress of a run: counters, and the rule that says when a periodic action is due.

This module imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The counters of an online run: episodes, version and lag."""

    num_updates: int
    update: int = 0  # updates completed, one per rollout batch
    version: int = 0  # version of the weights: the number of updates since the initial weights
    episode: int = 0  # number of responses trained on
    lag: int = 0  # version of the weights before the last update, minus the oldest version in its batch
    wall_s: float = 0.0  # seconds of all updates, including earlier sessions of the run
    best: float | None = None  # best value so far of the evaluation metric `Config.metric`
    unevaluated: bool = True  # the evaluation of the initial policy, or an interrupted one, is still to do
    lost_rows: list[str] = field(default_factory=list)  # files of rows that could not be restored on resume

    @property
    def done(self) -> bool:
        """Whether all updates are completed."""
        return self.update >= self.num_updates

    def advance(self, batch: Rollouts) -> None:
        """Update the counters after training on `batch`."""
        self.lag = self.version - batch.version
        self.update += 1
        self.version += 1
        self.episode += batch.episodes

    def due(self, every: float, at_end: bool = False) -> bool:
        """Return whether a periodic action is due after the current update.

        Args:
            every: number of updates between two actions; below 1: a fraction of the run; 0: never.
            at_end: whether the action is also due after the last update.
        """
        if every == 0:
            return False
        if at_end and self.done:
            return True
        period = every if every >= 1 else max(1.0, every * self.num_updates)
        return math.floor(self.update / period + 1e-9) > math.floor((self.update - 1) / period + 1e-9)

    def position(self) -> dict[str, float]:
        """Return the counters as columns of a row of metrics."""
        return {"update": self.update, "version": self.version, "episode": self.episode, "lag": self.lag}

    def progress(self) -> str:
        """Return the counters as text for the progress display."""
        return f"{self.episode:,} episodes"

    def state_dict(self) -> dict[str, Any]:
        """Return all counters."""
        return asdict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set all counters to saved values, except the length of the run, which may have been extended."""
        self.unevaluated = False  # earlier versions did not save it
        for name, value in saved.items():
            if name != "num_updates":
                setattr(self, name, value)


@dataclass(slots=True, kw_only=True)
class SupervisedState(TrainState):
    """The counters of a run on stored completions (SFT, reward model): epochs and examples."""

    data_size: int  # number of training examples
    examples: int = 0  # number of examples trained on, counted in every epoch

    def advance(self, batch: Rollouts) -> None:
        """Update the counters after training on `batch`."""
        self.update += 1
        self.version += 1
        self.episode += batch.episodes
        self.examples += len(batch)

    @property
    def epoch(self) -> float:
        """The number of passes over the training data so far."""
        return self.examples / self.data_size

    def position(self) -> dict[str, float]:
        """Return the counters as columns of a row of metrics."""
        return {"update": self.update, "epoch": round(self.epoch, 4), "examples": self.examples}

    def progress(self) -> str:
        """Return the counters as text for the progress display."""
        return f"epoch {self.epoch:.2f}"
