"""Construction of the loggers of a run."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from rlhf.assembly.parts import make
from rlhf.loggers.display import Display
from rlhf.loggers.jsonl import JsonlLogger
from rlhf.loggers.logger import Logger, LoggerContext

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


def build_loggers(cfg: Config, folder: RunFolder, state: TrainState) -> list[Logger]:
    """Return the loggers of the run folder and the terminal, and each logger that the config turns on."""
    title = f"{cfg.algo.name} {cfg.task.name}"
    loggers = [JsonlLogger(folder, state), Display(title, state, cfg.progress, cfg.eval.samples)]
    context = LoggerContext(folder=folder, state=state)
    chosen = (getattr(cfg.logger, each.name) for each in fields(cfg.logger))
    return [*loggers, *(make(section, context) for section in chosen if section is not None)]
