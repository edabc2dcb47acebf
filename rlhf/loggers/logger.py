"""What a logger is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState


class Logger:
    """Takes rows of metrics. The methods do nothing here: a logger writes down only what it cares for."""

    def log(self, row: Row, state: TrainState) -> None:
        """A row of training figures."""

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """A row of evaluation figures, with the completions they were measured on."""

    def warn(self, text: str) -> None:
        """Something that the user must see."""

    def close(self) -> None:
        """The run is over."""
