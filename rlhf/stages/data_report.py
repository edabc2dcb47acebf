"""The data of a run in the terminal: rows, columns, lengths, examples, and warnings about rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf.core.console import say, say_row
from rlhf.tasks.summary import summarize

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)


def report_data(cfg: Config, task: Task) -> None:
    """Print what the data of a run contain, and warn of data that training uses only in part.

    Raises:
        UserError: a split that the run reads cannot be loaded, or has no prompt that can be used.
    """
    splits = ("train", "validation") if cfg.schedule.eval_every else ("train",)
    summary = summarize(task, cfg.generator.response_length, splits)
    for name, value in summary.rows():
        say_row(name, value)
    for line in summary.lines():
        say(f"    {line}")
    for warning in summary.warnings():
        log.warning("%s", warning)
