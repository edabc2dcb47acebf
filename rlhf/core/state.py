"""Where a run stands: the counters that its objective moves, and what is due at them. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.core.batch import Rollouts


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The counters of an online run: episodes, version and lag."""

    num_updates: int
    update: int = 0  # rollout batches consumed
    version: int = 0  # updates that the weights have seen
    episode: int = 0  # sampled responses trained on
    lag: int = 0  # version trained minus version that sampled, of the last batch
    wall_s: float = 0.0  # seconds of all sessions of this run
    best: float | None = None  # best value of the objective metric so far

    @property
    def done(self) -> bool:
        """All updates are made."""
        return self.update >= self.num_updates

    def advance(self, batch: Rollouts) -> None:
        """Count a batch that has been trained on."""
        self.lag = self.version - batch.version
        self.update += 1
        self.version += 1
        self.episode += batch.episodes

    def due(self, every: float, at_end: bool = False) -> bool:
        """Whether something done `every` so many updates (below 1: that fraction of the run; 0: never) is due
        now.
        """
        if every == 0:
            return False
        if at_end and self.done:
            return True
        period = every if every >= 1 else max(1.0, every * self.num_updates)
        return math.floor(self.update / period + 1e-9) > math.floor((self.update - 1) / period + 1e-9)

    def position(self) -> dict[str, float]:
        """The counters as columns of a row of metrics."""
        return {"update": self.update, "version": self.version, "episode": self.episode, "lag": self.lag}

    def progress(self) -> str:
        """The counters in words, for the progress display."""
        return f"{self.episode:,} episodes  v{self.version}  lag {self.lag}"

    def state_dict(self) -> dict[str, Any]:
        """All counters."""
        return asdict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Stand where `saved` stood."""
        for name, value in saved.items():
            setattr(self, name, value)


@dataclass(slots=True, kw_only=True)
class SupervisedState(TrainState):
    """The counters of a run on stored completions: epochs and examples."""

    data_size: int  # examples of the training data
    examples: int = 0

    def advance(self, batch: Rollouts) -> None:
        """Count a batch that has been trained on."""
        self.update += 1
        self.version += 1
        self.episode += batch.episodes
        self.examples += len(batch)

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.examples / self.data_size

    def position(self) -> dict[str, float]:
        """The counters as columns of a row of metrics."""
        return {"update": self.update, "epoch": round(self.epoch, 4), "examples": self.examples}

    def progress(self) -> str:
        """The counters in words, for the progress display."""
        return f"{self.examples:,} examples  epoch {self.epoch:.2f}"
