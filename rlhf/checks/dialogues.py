"""Rules for tasks with dialogues: the chat template of the tokenizer, and settings that replace it."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.model_folders import tokenizer_in, tokenizer_of
from rlhf.checks.rules import doubt, rule
from rlhf.config.root import Config
from rlhf.config.task import ChatConfig
from rlhf.core.chat_format import no_template
from rlhf.tasks.dialogues import has_dialogues


@rule
def dialogues_have_a_template(cfg: Config) -> Iterator[str]:
    """Yield an error if the task has dialogues and the tokenizer of the model has no chat template."""
    _, path = tokenizer_of(cfg)
    if path is None or cfg.model.chat_template is not None:
        return
    tokenizer = tokenizer_in(path)
    if tokenizer is not None and not tokenizer.has_chat_template and has_dialogues(cfg.task):
        yield no_template(path)


@doubt
def questions_as_text(cfg: Config) -> Iterator[str]:
    """Yield a warning if a model with a chat template is asked in the form for base models."""
    _, path = tokenizer_of(cfg)
    tokenizer = tokenizer_in(path) if path is not None else None
    if cfg.task.for_base_models and tokenizer is not None and tokenizer.has_chat_template:
        yield (
            "task.chat=false asks the questions as texts, in a form for base models, but the tokenizer of "
            f"{path} has a chat template; if it is a chat model, set task.chat=true"
        )


@doubt
def unused_template(cfg: Config) -> Iterator[str]:
    """Yield a warning if `task.turn` replaces the chat template that the config names."""
    if isinstance(cfg.task, ChatConfig) and cfg.task.turn is not None and cfg.model.chat_template is not None:
        yield (
            "model.chat_template does not format the prompts (task.turn does), got "
            f"{cfg.model.chat_template}; set task.turn=null task.reply=null"
        )
