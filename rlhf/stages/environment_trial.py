"""Trial of the environment of a run: it plays a turn of three examples before a model is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.assembly.data import build_task
from rlhf.assembly.parts import make
from rlhf.assembly.tokenizer import build_stop_ids, build_tokenizer
from rlhf.config.algo import Data
from rlhf.core.batch import Sampling
from rlhf.core.console import say_row
from rlhf.core.errors import RunError, UserError
from rlhf.environments.episodes import Episodes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.environments.environment import EnvironmentFactory
    from rlhf.tasks.task import Task

log = logging.getLogger(__name__)

_EXAMPLES = 3


def report_environment(cfg: Config, task: Task | None = None) -> None:
    """Try the environment of a run, print its limits, and log warnings.

    Args:
        cfg: the config of the run.
        task: the data of the run; None: they are built.

    Raises:
        UserError: see `tried_environment`.
    """
    if not cfg.environment.answers:
        return
    tokenizer = build_tokenizer(cfg)
    task = task or build_task(cfg, tokenizer, Data.prompts, 1)
    described, warnings = tried_environment(cfg, task, tokenizer)
    for warning in warnings:
        log.warning("%s", warning)
    say_row("environment", described)


def tried_environment(cfg: Config, task: Task, tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[str]]:
    """Play the first turn of three training examples with an empty reply; return a description and warnings.

    Raises:
        UserError: the class fails as it would in the run, or the chat template has no fixed form of messages.
    """
    factory: EnvironmentFactory = make(cfg.environment, tokenizer)
    warnings = [*factory.turns.warnings()]
    prompts = task.batch([*range(min(_EXAMPLES, len(task.examples("train"))))])
    sampling = Sampling(
        samples=1, temperature=1.0, response_length=cfg.generator.response_length, purpose="trial"
    )
    stop_ids, stopping = build_stop_ids(cfg, tokenizer), replace(factory, on_error="stop")
    try:
        with Episodes(prompts, sampling, stopping, stop_ids, cfg.seed) as played:
            for i in played.running():
                played.reply(i, [tokenizer.eos_token_id], [0.0])
            played.running()
    except RunError as error:
        if factory.on_error == "stop":
            raise UserError(str(error)) from error
        warnings.append(str(error).rpartition("; ")[0])
    else:
        if played.unread:
            warnings.append(
                f"{factory.address} returns {played.unread!r:.60} from reset, which the model does not read "
                f"with task={cfg.task.name}, whose rows are the prompts; set task=environment, or put the text "
                "into the prompts"
            )
    limits = f"at most {factory.max_turns} replies; role of messages: {factory.turns.role}"
    return f"{cfg.environment.name}, {limits}", warnings
