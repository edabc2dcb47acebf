"""The interface of a logger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerContext:
    """What a logger gets from its run, besides its own section.

    Args:
        folder: the run folder.
        state: the counters of the run; they change while it trains.
    """

    folder: RunFolder
    state: TrainState


class Logger:
    """Receives rows of metrics. Every method does nothing by default; a logger overrides those it needs."""

    def log(self, row: Row, state: TrainState) -> None:
        """Log the metrics of an update."""

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Log the metrics of an evaluation, and the completions that were evaluated."""

    def warn(self, text: str) -> None:
        """Show a warning to the user."""

    def close(self) -> None:
        """Flush and close at the end of a run."""
