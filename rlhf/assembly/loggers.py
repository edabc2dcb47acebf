"""Build the loggers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.loggers.display import Display
from rlhf.loggers.jsonl import JsonlLogger

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.loggers.logger import Logger
    from rlhf.runs.folder import RunFolder


def build_loggers(cfg: Config, folder: RunFolder, state: TrainState) -> list[Logger]:
    """The files of the run folder, the terminal, and what the config turns on."""
    title = f"{cfg.algo.name} {cfg.task.name}"
    loggers: list[Logger] = [
        JsonlLogger(folder, state),
        Display(title, state, cfg.progress, cfg.eval.samples),
    ]
    if cfg.logger.tensorboard is not None:
        from rlhf.loggers.tensorboard import TensorboardLogger

        loggers.append(TensorboardLogger(cfg.logger.tensorboard, folder.path, state))
    if cfg.logger.wandb is not None:
        from rlhf.loggers.wandb import WandbLogger

        loggers.append(WandbLogger(cfg.logger.wandb, folder, state))
    return loggers
