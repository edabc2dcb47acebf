"""Rules for scorers: which scorer can score which task, and whether training sees its judge."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import doubt, rule, training_rule
from rlhf.config.root import Config
from rlhf.config.scorer import MixtureScorerConfig, choice, scorers
from rlhf.config.task import MixtureConfig
from rlhf.core.launched import world_size
from rlhf.core.machine import this_machine
from rlhf.memory.generator import annotates
from rlhf.memory.plan import device

WITHOUT_ANSWERS = ("tldr_mini", "tldr", "chat", "preferences")  # tasks whose references contain no answer


@rule
def judges(cfg: Config) -> Iterator[str]:
    """Yield an error for each scorer that cannot score the responses of the task."""
    for at, scorer in scorers(cfg):
        key, task = choice(at), scored_task(cfg, at)
        if scorer.name == "facts" and task != "tldr_mini":
            yield (
                f"{key} must not be facts for task={task} (that program knows only the facts of "
                f"task=tldr_mini), got facts; set {key}=reward_model"
            )
        if scorer.name == "answer" and task in WITHOUT_ANSWERS:
            yield (
                f"{key} must not be answer for task={task} (its references contain no answer to "
                f"compare with), got answer; set {key}=reward_model"
            )
    if cfg.gold.name == "labels":
        yield (
            "scorer@gold must not be labels (evaluation samples responses, which have no labels), got "
            "labels; set scorer@gold=reward_model gold.path=<hub name or folder>"
        )


def scored_task(cfg: Config, at: str) -> str:
    """Return the name of the task whose responses the scorer at the key `at` scores."""
    whole, _, name = at.partition(".parts.")
    scorer = cfg.gold if whole == "gold" else cfg.scorer
    if isinstance(cfg.task, MixtureConfig) and isinstance(scorer, MixtureScorerConfig):
        part = cfg.task.parts.get(name.partition(".")[0])
        return cfg.task.name if part is None else part.name
    return cfg.task.name


@rule
def parts_of_a_mixture_have_scorers(cfg: Config) -> Iterator[str]:
    """Yield an error if the scorers of `scorer=mixture` are not those of the parts of `task=mixture`."""
    for at, scorer in (("scorer", cfg.scorer), ("gold", cfg.gold)):
        if not isinstance(scorer, MixtureScorerConfig):
            continue
        key = choice(at)
        if not isinstance(cfg.task, MixtureConfig):
            yield (
                f"{key} must not be mixture for task={cfg.task.name} (only task=mixture has parts), got "
                f"mixture; set {key}=reward_model"
            )
            continue
        for name in cfg.task.parts:
            if name not in scorer.parts:
                yield (
                    f"{at}.parts must have a scorer for each part of the task ({', '.join(cfg.task.parts)}), "
                    f"got {', '.join(scorer.parts) or 'none'}; set +scorer@{at}.parts.{name}=<scorer>"
                )
        for name in scorer.parts:
            if name not in cfg.task.parts:
                yield (
                    f"{at}.parts must be named like the parts of the task ({', '.join(cfg.task.parts)}), got "
                    f"{name}; leave it out"
                )
        if cfg.generator.rollouts and not cfg.generator.samples and at == "scorer":
            yield (
                "scorer must not be mixture with saved rollouts (they do not name the part of a prompt), "
                "got mixture; set scorer=labels"
            )


@training_rule
def functions_reach_the_annotator(cfg: Config) -> Iterator[str]:
    """Yield an error for a function that exists only in this process, if another process has to call it."""
    for at, scorer in scorers(cfg):
        here = [] if at.startswith("gold") else scorer.only_here
        if here and annotates(cfg, world_size(), device(cfg, this_machine()) == "cuda"):
            yield (
                f"{at}.path must name a function of a module or a file for this run (another process scores "
                f"the responses, see generator.annotate, and does not have the object), got {here[0]}; set "
                "generator.annotate=false, or write the function in a module"
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
