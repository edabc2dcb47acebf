"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.config.logger import TensorboardConfig
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState


class TensorboardLogger(Logger):
    """Scalars by update; what an earlier session wrote beyond the checkpoint is hidden."""

    def __init__(self, config: TensorboardConfig, folder: Path, state: TrainState) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            folder / "tensorboard",
            flush_secs=config.flush_secs,
            purge_step=state.update + 1 if state.update else 0,
        )

    def log(self, row: Row, state: TrainState) -> None:
        """Write each figure."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Write each figure, and the first completion."""
        self.log(row, state)
        for sample in evaluation.samples[:1]:
            self.writer.add_text(
                "completion", f"{sample['prompt']}\n\n**{sample['response']}**", state.update
            )

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()
