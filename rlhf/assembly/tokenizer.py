"""Construction of the tokenizer of a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf.assembly.parts import build_source, make
from rlhf.config.algo import Trains
from rlhf.core.chat_format import Tools, set_format
from rlhf.core.console import say_row
from rlhf.environments.library import schemas
from rlhf.models.tokenizer import declared_ends, read_tokenizer, set_pad_token, stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config


log = logging.getLogger(__name__)


def build_tokenizer(cfg: Config, notes: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Return the policy's tokenizer; for a model with random weights, the tokenizer of the embedded task.

    If the task has dialogues, the end token is the token that ends a turn in the chat template.

    Args:
        cfg: the config of the run.
        notes: gets the row "pad token" if the model has no pad token, so that one was chosen.

    Raises:
        UserError: the tokenizer cannot be used, or has no chat template for the dialogues of the task.
    """
    name = cfg.model.tokenizer or cfg.start
    if name is None:
        assert cfg.task.embedded, "validated: only embedded tasks start from nothing"
        made: PreTrainedTokenizerFast = make(cfg.task).tokenizer()
        if cfg.model.chat_template is not None:
            set_format(made, cfg.model.chat_template, build_source(cfg).conversational)
        return made
    start = "model.base" if cfg.algo.trains is Trains.base else "model.policy"
    key = "model.tokenizer" if cfg.model.tokenizer else start
    tokenizer = read_tokenizer(name, cfg.model.trust_remote_code, key)
    set_format(tokenizer, cfg.model.chat_template, build_source(cfg).conversational, cfg.model.clock)
    models = (name,) if cfg.start in (None, name) else (name, cfg.start)
    note = set_pad_token(tokenizer, cfg.model.pad_token, models=models)
    if note is not None and notes is not None:
        notes["pad token"] = note
    return tokenizer


def build_stop_ids(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of the tokens that end a response: of the tokenizer first, then of the model's files."""
    return stop_ids(tokenizer, [cfg.start] if cfg.start else [])


def build_tools(cfg: Config) -> Tools:
    """Return the JSON schemas of the functions that replies may call; None: the run has no tools.

    Raises:
        UserError: a function cannot be imported, or lacks type hints or a docstring.
    """
    return schemas(cfg.environment.tools) or None


def declared_tokens(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the texts of the tokens that end a response besides the end token of the tokenizer.

    The ids that a model declares are those of its own tokenizer; for the tokenizer of a judge there are none.
    """
    if tokenizer.name_or_path != (cfg.model.tokenizer or cfg.start):
        return []
    texts = [str(tokenizer.decode([number])) for number in build_stop_ids(cfg, tokenizer)[1:]]
    return [text for text in texts if text.strip()]


def say_ends(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print the tokens that end a response, if there are several, and the declared ids that no token has."""
    if cfg.algo.trains is Trains.reward:
        return
    ends = build_stop_ids(cfg, tokenizer)
    if len(ends) > 1:
        say_row("responses end with", names_of(ends, tokenizer))
    if cfg.start and (unknown := sorted(declared_ends([cfg.start]) - set(tokenizer.get_vocab().values()))):
        log.warning(
            f"end tokens that {cfg.start} declares are not used, because no token of the tokenizer has these "
            f"ids: {', '.join(map(str, unknown))}"
        )


def names_of(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokens with these ids as a list for a reader, such as `<|im_end|>, <|endoftext|>`."""
    return ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
