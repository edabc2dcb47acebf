"""Rules for scorers: which scorer can score which task, and whether training sees its judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config.scorer import choice, scorers

if TYPE_CHECKING:
    from rlhf.config.root import Config


def judges(cfg: Config) -> Iterator[str]:
    """Scorers that cannot score this task."""
    for at, scorer in scorers(cfg):
        key = choice(at)
        if scorer.name == "facts" and cfg.task.name != "tldr_mini":
            yield (
                f"{key} must not be facts for task={cfg.task.name} (that program knows the facts of "
                f"task=tldr_mini alone), got facts; set {key}=reward_model"
            )
        if scorer.name == "answer" and cfg.task.name in WITHOUT_ANSWERS:
            yield (
                f"{key} must not be answer for task={cfg.task.name} (its references hold no answer to "
                f"compare with), got answer; set {key}=reward_model"
            )
    if cfg.gold.name == "labels":
        yield (
            "scorer@gold must not be labels (evaluation samples responses, which have no labels), got "
            "labels; set scorer@gold=reward_model gold.path=<hub name or folder>"
        )


WITHOUT_ANSWERS = ("tldr_mini", "tldr", "chat", "preferences")


def training_sees_its_judge(cfg: Config) -> Iterator[str]:
    """The proxy and the judge, or parts of them, are one."""
    if not cfg.generator.samples:
        return
    judging = {scorer.source(cfg): choice(at) for at, scorer in scorers(cfg) if at.startswith("gold")}
    for at, scorer in scorers(cfg):
        judge = judging.get(scorer.source(cfg))
        if at.startswith("scorer") and judge is not None:
            yield (
                f"{choice(at)} and {judge} are the same ({scorer.name}): training sees its judge, so "
                "eval/win_rate says nothing about over-optimisation"
            )
