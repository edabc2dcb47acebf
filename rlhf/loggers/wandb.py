"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from rlhf.folder import RunFolder
from rlhf.loggers.config import WandbConfig
from rlhf.loggers.logger import Logger, Row
from rlhf.state import TrainState

if TYPE_CHECKING:
    from rlhf.evaluate import Evaluation


class WandbLogger(Logger):
    """Rows by update, completions as a table. The run's id is the run folder's name, so a resumed run goes on
    in it.
    """

    def __init__(self, config: WandbConfig, folder: RunFolder) -> None:
        import wandb

        self.wandb = wandb
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode.value,
            dir=folder.path,
            id=folder.path.name,
            name=folder.path.name,
            resume="allow",
            config=cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(folder.config))),
        )

    def log(self, row: Row, state: TrainState) -> None:
        """Log the row at its update."""
        self.run.log(row, step=state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Log the row, and a table of completions."""
        columns: list[Any] = list(evaluation.samples[0]) if evaluation.samples else []
        table = self.wandb.Table(columns, [[sample[c] for c in columns] for sample in evaluation.samples])
        self.run.log({**row, "completions": table} if columns else row, step=state.update)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()
