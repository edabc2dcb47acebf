"""Trial of the environment of a run: it begins an episode of a held-out example before a model is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf.assembly.data import build_task
from rlhf.assembly.parts import make
from rlhf.assembly.tokenizer import build_stop_ids, build_tokenizer
from rlhf.config.algo import Data
from rlhf.config.scorer import scorers
from rlhf.core.batch import Sampling
from rlhf.core.console import say_row
from rlhf.core.errors import RunError, UserError
from rlhf.environments.episodes import Episodes
from rlhf.environments.tools import gives_rewards

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)


def report_environment(cfg: Config, task: Task | None = None) -> None:
    """Begin an episode of the first held-out example, and log what the chat template does to episodes.

    Args:
        cfg: the config of the run.
        task: the data of the run; None: they are built.

    Raises:
        UserError: the class fails, or the chat template has no fixed form of messages.
    """
    if not cfg.environment.answers:
        return
    tokenizer = build_tokenizer(cfg)
    factory: EnvironmentFactory = make(cfg.environment, tokenizer)
    for warning in factory.turns.warnings():
        log.warning("%s", warning)
    reads = any(each.reads_rewards for at, each in scorers(cfg) if not at.startswith("gold"))
    if cfg.environment.tools and not reads and gives_rewards(cfg.environment.tools):
        log.warning(
            "no scorer reads the rewards of the tools; set scorer=environment, or add a part to "
            "scorer=weighted: +scorer@scorer.parts.tools=environment"
        )
    task = task or build_task(cfg, tokenizer, Data.prompts, 1)
    sampling = Sampling(samples=1, temperature=1.0, response_length=1, purpose="trial")
    stop_ids = build_stop_ids(cfg, tokenizer)
    try:
        Episodes(task.held_out(1, data=Data.prompts), sampling, factory, stop_ids, cfg.seed).close()
    except RunError as error:
        raise UserError(str(error)) from None
    limits = f"at most {factory.max_turns} replies; role of messages: {factory.turns.role}"
    say_row("environment", f"{cfg.environment.name}, {limits}")
