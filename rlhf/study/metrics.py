"""Metrics that tables, figures and claims may name: those of docs/reference/metrics.md that rows keep."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf.config.algo import Trains
from rlhf.config.root import Config
from rlhf.study.formula import read_formula
from rlhf.study.spec import Spec

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
generator: restarts requeued
annotator: restarts
"""
_LINES = (line.split(": ") for line in _NAMES.strip().splitlines())
KNOWN = [f"{family}/{name}" for family, names in _LINES for name in names.split()]
# Figures of environments, scorers and tasks with names of the user, and bounds of intervals.
_OPEN = re.compile(r"(eval/)?environment/\w+|objective/scores/.+|(eval/)?part/.+|eval/\w+_(low|high)")
_JUDGED = re.compile(r"eval/(win_rate|tie_rate|gold_score|norm_reward)(_low|_high)?")
_SCORED = re.compile(r"eval/(win_rate_vs_initial|score)(_low|_high)?")


def unknown(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the metrics that no run has unless the user's code returns them: key of the study file, name."""
    for key, name in named(spec):
        if name not in KNOWN and not _OPEN.fullmatch(name):
            yield key, name


def remedy(cfg: Config, name: str) -> str | None:
    """Return what to do if a run lacks the judge or the scorer that measures a metric of its evaluations."""
    rewards = cfg.algo.trains is Trains.reward
    if _JUDGED.fullmatch(name) and (rewards or cfg.gold.name == "none"):
        return "choose another one" if rewards else "set scorer@gold or choose another one"
    scored = not rewards and cfg.scores_completions
    return "choose another one" if _SCORED.fullmatch(name) and not scored else None


def named(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the metrics that a study names: key of the study file, name."""
    formulas = {f"claims.{said}": read_formula(text) for said, text in spec.claims.items()}
    found = [(f"tasks.{name}.metric", task.metric) for name, task in spec.tasks.items()]
    found += [(f"tables.{place}", each.quantity) for place, each in enumerate(spec.tables)]
    found += [(f"figures.{place}", each.quantity) for place, each in enumerate(spec.figures)]
    sides = ((key, side) for key, each in formulas.items() if each for side in (each.left, each.right))
    found += [(key, side.quantity) for key, side in sides if side]
    yield from ((key, name) for key, name in found if name and "/" in name)
