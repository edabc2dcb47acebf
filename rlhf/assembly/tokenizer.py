"""Construction of the tokenizer of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.assembly.parts import make
from rlhf.config.algo import Trains
from rlhf.config.task import EmbeddedTaskConfig
from rlhf.core.chat_format import set_format
from rlhf.models.tokenizer import read_tokenizer, set_pad_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config


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
        assert isinstance(cfg.task, EmbeddedTaskConfig), "validated: only embedded tasks start from nothing"
        made: PreTrainedTokenizerFast = make(cfg.task).tokenizer()
        return made
    start = "model.base" if cfg.algo.trains is Trains.base else "model.policy"
    key = "model.tokenizer" if cfg.model.tokenizer else start
    tokenizer = read_tokenizer(name, cfg.model.trust_remote_code, key)
    set_format(tokenizer, cfg.model.chat_template, make(cfg.task).conversational)
    models = (name,) if cfg.start in (None, name) else (name, cfg.start)
    note = set_pad_token(tokenizer, cfg.model.pad_token, models=models)
    if note is not None and notes is not None:
        notes["pad token"] = note
    return tokenizer
