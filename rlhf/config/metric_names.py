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
eval: win_rate win_rate_vs_initial tie_rate gold_score score norm_reward kl ppl response_tokens eos_rate loss
eval: accuracy margin reward; loss: policy value; value: mean returns clipfrac; logps: chosen rejected
objective: scores scores_margin tie_rate kl entropy non_score_reward rlhf_reward kl_coef eos_rate
policy: grad_norm lr_scale skipped_steps overflows ratio approxkl clipfrac entropy off_policy_masked
objective: response_tokens; policy: covariance_limited; rewards: chosen rejected margins accuracies
mismatch: kl max_ratio ess token_ess step_ess token_lag; correction: truncated masked weight rejected
rollouts: time_s update_s generators_busy trainer_busy lag lag_p90 oldest queue length_ratio wasted dropped
rollouts: cut refilled refilled_share no_signal; generator: restarts requeued; annotator: restarts
weighting: mean truncated ess; prompts: solved; replay: age; oapl: advantage; warning: collapse
"""
_FAMILIES = (each.split(": ") for each in re.split("; |\n", _NAMES.strip()))
KNOWN = [f"{family}/{name}" for family, names in _FAMILIES for name in names.split()]
_EPISODES = "turns token_share tool_errors step_errors out_of_turns cut no_room"
_OF_EPISODES = [f"environment/{name}" for name in _EPISODES.split()]
# Figures of environments, scorers and tasks with names of the user.
_OPEN = re.compile(
    r"(eval/)?environment/\w+|objective/scores/.+|part/[^/]+/(prompts|scores|response_tokens|eos_rate)"
    r"|eval/part/[^/]+/(score|gold_score|win_rate|response_tokens)"
)
_NEAR = 0.9  # similarity of a misspelled name


def is_own(name: str) -> bool:
    """Return whether only code of the user can measure a metric."""
    return name not in KNOWN and not _OPEN.fullmatch(name)


def lacking(name: str, cfg: Config, code: bool = False) -> tuple[str, str] | None:
    """Return rule and remedy for a metric that a run does not have; None if the run may have the metric.

    A plug-in may add any metric, other code of the user a family of metrics. A name that is almost one of
    this project is misspelled nevertheless.

    Args:
        name: the metric.
        cfg: the config of the run.
        code: whether the run calls functions or classes of the user.
    """
    name = re.sub("_(low|high)$", "", name) if name.startswith("eval/") else name
    family, kind, may = name.partition("/")[0], name.removeprefix("eval/").partition("/")[0], True
    if kind == "environment":
        may = cfg.environment.name != "none"
    elif is_own(name):
        plugged = any(not PARTS.get(type(each), "rlhf.").startswith("rlhf.") for _, each in sections(cfg))
        may = plugged or (code and not any(known.startswith(f"{family}/") for known in KNOWN))
    elif kind == "part":
        may = name.split("/")[-2] in cfg.task.shares
    every = [*KNOWN, *_OF_EPISODES]
    alike = [known for known in every if known.count("/") == name.count("/")]
    if not may or (name not in every and get_close_matches(name, alike, cutoff=_NEAR)):
        guess = "" if name in every else suggestion(name, every, "did you mean {}?")
        return "name a metric that rows keep (see docs/reference/metrics.md)", guess or "choose another one"
    rewards, remedy = cfg.algo.trains is Trains.reward, ""
    if name in ("eval/win_rate", "eval/tie_rate", "eval/gold_score", "eval/norm_reward"):
        remedy = "choose another one" if rewards else "set scorer@gold or choose another one"
        remedy = remedy if rewards or cfg.gold.name == "none" else ""
    elif name in ("eval/win_rate_vs_initial", "eval/score") and (rewards or not cfg.scores_completions):
        remedy = "choose another one"
    return ("be a metric that the runs have", remedy) if remedy else None
