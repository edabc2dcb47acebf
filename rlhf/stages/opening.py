"""The lines at the beginning of a run: its sizes and memory, its data, and warnings about them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlhf.assembly.models import say_ends
from rlhf.assembly.training import check_formats
from rlhf.config.identity import model_label
from rlhf.core.console import say, say_row
from rlhf.core.formatting import short_path
from rlhf.stages.rehearsal import rehearse
from rlhf.stages.summary import describe, doubts
from rlhf.tasks.summary import summarize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.core.stages import Stages
    from rlhf.processes.ranks import Ranks
    from rlhf.runs.folder import RunFolder
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)


def print_opening(
    cfg: Config,
    folder: RunFolder,
    stages: Stages,
    task: Task,
    tokenizer: PreTrainedTokenizerFast,
    notes: Mapping[str, str],
    ranks: Ranks,
) -> None:
    """Print the opening lines of a run, and try its reward functions on data that are not generated.

    Args:
        cfg: the config of the run, with the models that the run made first.
        folder: the run folder.
        stages: the stages of the command; the last one is the run.
        task: the data of the run.
        tokenizer: the policy's tokenizer.
        notes: further rows, by name.
        ranks: the ranks of the run.

    Raises:
        UserError: a split that the run reads cannot be loaded, or has no prompt that can be used, a reward
            function fails, or the chat template of a reward model does not format a dialogue.
    """
    number = stages.prefix(len(stages.names))
    say(f"{number}{cfg.algo.name} of {model_label(cfg)} on {cfg.task.name}", style="bold")
    if stages.outermost:
        say_row("run folder", short_path(folder.path))
    for name, value in [*describe(cfg, len(task)), *notes.items()]:
        say_row(name, value)
    say_ends(cfg, tokenizer)
    _log_all(doubts(cfg, len(task)))
    if not cfg.task.embedded:
        _print_data(cfg, task)
        ranks.from_first(lambda: rehearse(cfg, task))
        ranks.from_first(lambda: _log_all(check_formats(cfg, task, tokenizer)))


def _print_data(cfg: Config, task: Task) -> None:
    """Print what the data of a run contain, and warn of data that training uses only in part."""
    splits = ("train", "validation") if cfg.schedule.eval_every else ("train",)
    summary = summarize(task, cfg.generator.response_length, splits)
    for name, value in summary.rows():
        say_row(name, value)
    for line in summary.lines():
        say(f"    {line}")
    _log_all(summary.warnings())


def _log_all(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)
