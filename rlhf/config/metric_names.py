"""Names of metrics that a study or a sweep may name: those of docs/reference/metrics.md.

This module imports no torch.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.schema import PARTS, sections
from rlhf.config.suggestions import suggestion

if TYPE_CHECKING:
    from rlhf.config.root import Config

_NAMES = """
eval: win_rate win_rate_vs_initial tie_rate gold_score score norm_reward kl ppl response_tokens eos_rate
eval: loss accuracy margin reward
objective: scores scores_margin tie_rate kl entropy non_score_reward rlhf_reward kl_coef eos_rate
objective: response_tokens
loss: policy value
policy: grad_norm lr_scale skipped_steps overflows ratio approxkl clipfrac entropy off_policy_masked
policy: covariance_limited
value: mean returns clipfrac
rewards: chosen rejected margins accuracies
logps: chosen rejected
weighting: mean truncated ess
mismatch: kl max_ratio ess token_ess step_ess token_lag
prompts: solved
replay: age
correction: truncated masked weight rejected
oapl: advantage
rollouts: time_s update_s generators_busy trainer_busy lag lag_p90 oldest queue length_ratio wasted dropped
rollouts: cut refilled refilled_share no_signal
warning: collapse
environment: turns token_share tool_errors step_errors out_of_turns cut no_room
generator: restarts requeued
annotator: restarts
"""
_LINES = (line.split(": ") for line in _NAMES.strip().splitlines())
KNOWN = [f"{family}/{name}" for family, names in _LINES for name in names.split()]
# Figures of environments, scorers and tasks with names of the user.
_OPEN = re.compile(
    r"(eval/)?environment/\w+|objective/scores/.+|part/[^/]+/(prompts|scores|response_tokens|eos_rate)"
    r"|eval/part/[^/]+/(score|gold_score|win_rate|response_tokens)"
)
_NEAR = 0.9  # similarity of a misspelled name
_JUDGED = re.compile(r"eval/(win_rate|tie_rate|gold_score|norm_reward)(_low|_high)?")
_SCORED = re.compile(r"eval/(win_rate_vs_initial|score)(_low|_high)?")


def is_own(name: str) -> bool:
    """Return whether only code of the user can measure a metric."""
    known = re.sub("_(low|high)$", "", name) if name.startswith("eval/") else name
    return known not in KNOWN and not _OPEN.fullmatch(name)


def unknown(name: str, cfg: Config, code: bool = False) -> str | None:
    """Return a remedy for a metric that a run cannot have; None if it may have the metric.

    A plug-in may add any metric, other code of the user a family of metrics. A name that is almost one of
    this project is misspelled nevertheless.

    Args:
        name: the metric.
        cfg: the config of the run.
        code: whether the run calls functions or classes of the user.
    """
    family, (first, *_) = name.partition("/")[0], name.removeprefix("eval/").split("/")
    if first == "part":
        may = not is_own(name) and name.split("/")[-2] in cfg.task.shares
    elif first == "environment":
        may = cfg.environment.name != "none"
    elif is_own(name):
        plugged = any(not PARTS.get(type(each), "rlhf.").startswith("rlhf.") for _, each in sections(cfg))
        may = plugged or (code and not any(known.startswith(f"{family}/") for known in KNOWN))
    else:
        return None
    alike = [known for known in KNOWN if known.count("/") == name.count("/")]
    if may and (name in KNOWN or not get_close_matches(name, alike, cutoff=_NEAR)):
        return None
    guess = "" if name in KNOWN else suggestion(name, KNOWN, "did you mean {}?")
    return guess or "choose another one"


def remedy(cfg: Config, name: str) -> str | None:
    """Return what to do if a run lacks the judge or the scorer that measures a metric of its evaluations."""
    rewards = cfg.algo.trains is Trains.reward
    if _JUDGED.fullmatch(name) and (rewards or cfg.gold.name == "none"):
        return "choose another one" if rewards else "set scorer@gold or choose another one"
    scored = not rewards and cfg.scores_completions
    return "choose another one" if _SCORED.fullmatch(name) and not scored else None
