"""The interface of a logger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.core.metrics import Evaluation, Metrics, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerContext:
    """The parts of a run that a logger is built from, besides its config section.

    Args:
        folder: the run folder.
        state: the counters of the run; they change during training.
        figures: draws the figures of a run whose updates are complete: name -> PNG file.
    """

    folder: RunFolder
    state: TrainState
    figures: Callable[[], dict[str, bytes]]


class Logger:
    """A receiver of rows of metrics. By default every method does nothing; subclasses override methods."""

    def log(self, row: Row, state: TrainState) -> None:
        """Log the metrics of an update."""

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Log the metrics of an evaluation, and the completions that were evaluated."""

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Log when the groups of an update were sampled, how long they are, and what became of them."""

    def updated(self, figures: Metrics, state: TrainState) -> None:
        """Handle the end of an update; `figures` are the metrics since the last row."""

    def save(self, checkpoint: Path) -> None:
        """Write what a resumed run needs from this logger into the folder of a checkpoint."""

    def saved(self, checkpoint: Path, state: TrainState) -> None:
        """Handle a checkpoint that is complete."""

    def warn(self, text: str) -> None:
        """Show a warning to the user."""

    def close(self) -> None:
        """Write buffered rows and release resources at the end of a run."""
