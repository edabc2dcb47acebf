"""The logger of TensorBoard event files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.config.logger import TensorboardConfig
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.loggers.logger import LoggerContext


class TensorboardLogger(Logger):
    """A logger of scalars, with the update as x axis.

    After a resume, events newer than the checkpoint are hidden.

    Args:
        config: the config section of the logger.
        context: the run folder and the counters of the run.
    """

    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            context.folder.path / "tensorboard",
            flush_secs=config.flush_secs,
            purge_step=context.state.update + 1 if context.state.update else 0,
        )

    def log(self, row: Row, state: TrainState) -> None:
        """Write each metric of the row as a scalar."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Write each metric of the row as a scalar, and the first completion as text."""
        self.log(row, state)
        for sample in evaluation.samples[:1]:
            self.writer.add_text(
                "completion", f"{sample['prompt']}\n\n**{sample['response']}**", state.update
            )

    def close(self) -> None:
        """Write buffered events and close the event file."""
        self.writer.close()
