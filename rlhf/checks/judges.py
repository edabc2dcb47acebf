"""Rules for scorers: which scorer can score which task, and whether training sees its judge."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import (
    ALWAYS,
    RULES,
    TRAINING_RULES,
    When,
    doubt,
    must,
    other_than,
    rule,
    training_rule,
)
from rlhf.config.root import Config
from rlhf.config.scorer import choice, scorers
from rlhf.config.task import TaskConfig
from rlhf.core.launched import world_size
from rlhf.core.machine import this_machine
from rlhf.memory.generator import annotates
from rlhf.memory.plan import device

_SAVED_ROLLOUTS = When("with saved rollouts", lambda cfg: cfg.generator.saved_rollouts is not None)

RULES += [
    must(
        "scorer@gold",
        other_than("labels"),
        ALWAYS,
        "evaluation samples responses, which have no labels",
        fix="scorer@gold=reward_model gold.path=<hub name or folder>",
    ),
    must(
        "scorer",
        other_than("mixture"),
        _SAVED_ROLLOUTS,
        "they do not name the part of a prompt",
        fix="scorer=labels",
    ),
]

TRAINING_RULES += [
    must("scorer", other_than("none"), ALWAYS, "training needs scores", fix="scorer=reward_model")
]


@rule
def _scorers_of_saved_rollouts(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg) if cfg.generator.saved_rollouts is not None else ():
        if scorer.columns and not at.startswith("gold"):
            yield (
                f"{choice(at)} must not be {scorer.name} with saved rollouts (they lack the columns "
                f"{', '.join(sorted(scorer.columns))}), got {scorer.name}; set scorer=labels"
            )


@rule
def _scorers_of_tasks(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        key, task = choice(at), _scored_task(cfg, at)
        if reason := scorer.cannot_score(task):
            yield (
                f"{key} must not be {scorer.name} for task={task.name} ({reason}), got {scorer.name}; "
                f"set {key}=reward_model"
            )


def _scored_task(cfg: Config, at: str) -> TaskConfig:
    """Return the task whose responses the scorer at the key `at` scores: `cfg.task`, or a part of it."""
    whole, _, name = at.partition(".parts.")
    scorer = cfg.gold if whole == "gold" else cfg.scorer
    return cfg.task.parts.get(name.partition(".")[0], cfg.task) if scorer.of_mixture else cfg.task


@rule
def _parts_of_a_mixture_have_scorers(cfg: Config) -> Iterator[str]:
    tasks = cfg.task.parts
    for at, scorer in (("scorer", cfg.scorer), ("gold", cfg.gold)):
        if not scorer.of_mixture or scorer.cannot_score(cfg.task):
            continue
        for name in (name for name in tasks if name not in scorer.parts):
            yield (
                f"{at}.parts must have a scorer for each part of the task ({', '.join(tasks)}), got "
                f"{', '.join(scorer.parts) or 'none'}; set +scorer@{at}.parts.{name}=<scorer>"
            )
        for name in (name for name in scorer.parts if name not in tasks):
            yield (
                f"{at}.parts must be named like the parts of the task ({', '.join(tasks)}), got {name}; "
                "leave it out"
            )


@training_rule
def _functions_reach_the_annotator(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        here = [] if at.startswith("gold") else scorer.only_here
        if here and annotates(cfg, world_size(), device(cfg, this_machine()) == "cuda"):
            yield (
                f"{at}.path must name a function of a module or a file for this run (another process scores "
                f"the responses, see generator.annotate, and does not have the object), got {here[0]}; set "
                "generator.annotate=false, or write the function in a module"
            )


@doubt
def _training_sees_its_judge(cfg: Config) -> Iterator[str]:
    if not cfg.generator.samples:
        return
    reward = cfg.model.reward
    judging = {scorer.source(reward): choice(at) for at, scorer in scorers(cfg) if at.startswith("gold")}
    for at, scorer in scorers(cfg):
        judge = judging.get(scorer.source(reward))
        if at.startswith("scorer") and judge is not None and not scorer.verifies:
            yield (
                f"{choice(at)} and {judge} are the same ({scorer.name}): training sees its judge, so "
                "eval/win_rate says nothing about over-optimisation"
            )
