"""Trial of the environment of a run: it begins an episode of the first example before a model is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf.assembly.data import build_task
from rlhf.assembly.parts import make
from rlhf.assembly.tokenizer import build_stop_ids, build_tokenizer, build_turns
from rlhf.config.algo import Data
from rlhf.config.environment import TurnsConfig
from rlhf.core.batch import Sampling
from rlhf.core.console import say_row
from rlhf.core.errors import RunError, UserError
from rlhf.environments.episodes import Episodes

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)


def report_environment(cfg: Config, task: Task | None = None) -> None:
    """Begin an episode of the first training example, and log what the chat template does to episodes.

    Args:
        cfg: the config of the run.
        task: the data of the run; None: they are built.

    Raises:
        UserError: the class fails, or the chat template has no fixed form of messages.
    """
    if not isinstance(cfg.environment, TurnsConfig):
        return
    tokenizer = build_tokenizer(cfg)
    turns = build_turns(cfg, tokenizer)
    assert turns is not None
    for warning in turns.warnings():
        log.warning("%s", warning)
    task = task or build_task(cfg, tokenizer, Data.prompts, 1)
    sampling = Sampling(samples=1, temperature=1.0, response_length=1, purpose="trial")
    stop_ids = build_stop_ids(cfg, tokenizer)
    try:
        Episodes(
            task.batch([0]), sampling, make(cfg.environment, tokenizer), turns, stop_ids, cfg.seed
        ).close()
    except RunError as error:
        raise UserError(str(error)) from error
    most = cfg.environment.max_turns
    say_row("environment", f"{cfg.environment.name}, at most {most} replies; role of messages: {turns.role}")
