"""Rules for models: local folders, context length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.model import NanoConfig
from rlhf.config.scorer import RewardModelScorerConfig, scorers
from rlhf.models.folders import context_length, context_problem, folder_problem, is_local

if TYPE_CHECKING:
    from rlhf.config.root import Config


def models(cfg: Config) -> Iterator[str]:
    """Local model folders that are not there or not whole, and responses that no context holds."""
    contexts = []
    for key, path in named_models(cfg):
        if problem := folder_problem(key, path):
            yield problem
        elif is_local(path):
            contexts.append(context_length(path))
    tokenizer = cfg.model.tokenizer
    if tokenizer is not None and is_local(tokenizer) and not Path(tokenizer).expanduser().is_dir():
        yield (
            "model.tokenizer must name a tokenizer on the hub or a folder that holds one (no folder "
            f"{tokenizer!r} here), got {tokenizer!r}; set model.tokenizer=<hub name or folder>"
        )
    made = cfg.model.policy is None and cfg.model.base is None
    if isinstance(cfg.model, NanoConfig) and made and not contexts:
        contexts.append(cfg.model.context)
    context = min((c for c in contexts if c is not None), default=None)
    if problem := context_problem(context, cfg.task.max_prompt_tokens, cfg.generator.response_length):
        yield problem


def named_models(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the models that the config names, by key."""
    found = {f"model.{name}": getattr(cfg.model, name) for name in ("base", "policy", "reference", "reward")}
    for at, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig):
            found[f"{at}.path"] = scorer.path
    for key, path in found.items():
        if path is not None:
            yield key, path
