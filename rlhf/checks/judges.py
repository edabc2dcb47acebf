"""Rules for scorers: which scorer can score which task, and whether training sees its judge."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import doubt, rule, training_rule
from rlhf.config.root import Config
from rlhf.config.scorer import choice, scorers

WITHOUT_ANSWERS = ("tldr_mini", "tldr", "chat", "preferences")  # tasks whose references contain no answer


@rule
def judges(cfg: Config) -> Iterator[str]:
    """Yield an error for each scorer that cannot score the responses of the task."""
    for at, scorer in scorers(cfg):
        key = choice(at)
        if scorer.name == "facts" and cfg.task.name != "tldr_mini":
            yield (
                f"{key} must not be facts for task={cfg.task.name} (that program knows only the facts of "
                f"task=tldr_mini), got facts; set {key}=reward_model"
            )
        if scorer.name == "answer" and cfg.task.name in WITHOUT_ANSWERS:
            yield (
                f"{key} must not be answer for task={cfg.task.name} (its references contain no answer to "
                f"compare with), got answer; set {key}=reward_model"
            )
    if cfg.gold.name == "labels":
        yield (
            "scorer@gold must not be labels (evaluation samples responses, which have no labels), got "
            "labels; set scorer@gold=reward_model gold.path=<hub name or folder>"
        )


@training_rule
def training_needs_a_scorer(cfg: Config) -> Iterator[str]:
    """Yield an error if the training has no scorer; an evaluation needs none."""
    if cfg.scorer.name == "none":
        yield "scorer must not be none (training needs scores), got none; set scorer=reward_model"


@doubt
def training_sees_its_judge(cfg: Config) -> Iterator[str]:
    """Yield a warning for each training scorer (or part) that is also the judge (or a part of the judge)."""
    if not cfg.generator.samples:
        return
    reward = cfg.model.reward
    judging = {scorer.source(reward): choice(at) for at, scorer in scorers(cfg) if at.startswith("gold")}
    for at, scorer in scorers(cfg):
        judge = judging.get(scorer.source(reward))
        if at.startswith("scorer") and judge is not None:
            yield (
                f"{choice(at)} and {judge} are the same ({scorer.name}): training sees its judge, so "
                "eval/win_rate says nothing about over-optimisation"
            )
