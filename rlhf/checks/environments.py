"""Rules for the environment that answers the replies of the policy."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import RULES, Allowed, When, chosen, doubt, must, rule
from rlhf.config.environment import TurnsConfig
from rlhf.config.root import Config
from rlhf.config.scorer import choice, scorers

_SHORT = 64  # tokens of a short message
_ONE_REPLY_TASK = When(
    "with environment={environment} and task={task}",
    lambda cfg: cfg.environment.answers and cfg.task.embedded and not cfg.task.dialogues,
)
_PAIRS = When(
    "with algo={algo} and generator={generator}",
    lambda cfg: cfg.reads_pairs or (cfg.task.embedded and cfg.scorer.reads_reward and not cfg.model.reward),
)

RULES += [
    must("environment", "none", _PAIRS, "pairs consist of single replies"),
    must(
        "environment",
        Allowed("be a class or a library", lambda section: section.rewards),
        When("with task=environment", lambda cfg: cfg.task.name == "environment"),
        "its first messages are the prompts",
        fix="environment=python, gymnasium or openenv",
    ),
    must(
        "environment",
        "none",
        _ONE_REPLY_TASK,
        "its prompts are texts, without the marks of a dialogue",
        fix="environment=none, or task=calculator",
    ),
]


@rule
def _rewards_have_an_environment(cfg: Config) -> Iterator[str]:
    for at, each in scorers(cfg):
        key = choice(at)
        if each.reads_rewards and at.startswith("gold"):
            yield (
                f"{key} must not be environment (a judge compares with references, which are no episodes), "
                f"got environment; set scorer@gold=none"
            )
        elif each.reads_rewards and not cfg.environment.answers:
            yield (
                f"{key} must not be environment with environment={chosen(cfg, 'environment')} (it gives no "
                f"rewards), got environment; set {key}=answer"
            )


@doubt
def _room_for_every_turn(cfg: Config) -> Iterator[str]:
    section, length = cfg.environment, cfg.generator.response_length
    if not isinstance(section, TurnsConfig) or (reply := section.reply_tokens) is None:
        return
    turns, message = section.max_turns, section.message_tokens
    if turns * reply + (turns - 1) * message <= length:
        return
    shorter = min(message, max(_SHORT, (length - turns * reply) // max(1, turns - 1)))
    remedy, most = f"environment.message_tokens={shorter}", max(1, (length + shorter) // (reply + shorter))
    if most < turns:
        remedy += f" environment.max_turns={most}, or a larger generator.response_length"
    yield (
        f"environment.message_tokens={message} leaves no room for the longest messages between {turns} "
        f"replies of {reply} tokens in generator.response_length={length}; for these set {remedy}"
    )
