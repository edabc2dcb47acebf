"""Construction of the rule that warns of a collapse, with the settings that the warning recommends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.training.collapse import LIMITS, CollapseRule, Limits

if TYPE_CHECKING:
    from rlhf.config.root import Config


def build_collapse_rule(cfg: Config) -> CollapseRule:
    """Return the rule of a run; the rule of a run on stored responses never warns."""
    limits = LIMITS if cfg.generator.samples else Limits()
    return CollapseRule(f"set {' or '.join(remedies(cfg))}", limits)


def remedies(cfg: Config) -> list[str]:
    """Return overrides that make a collapse less likely: a lower learning rate, less lag, a correction."""
    schedule = cfg.schedule
    found = [f"optim.lr={cfg.optim.lr / 3:.1g}"]
    if schedule.max_lag > 1:
        found.append(f"schedule.max_lag={schedule.max_lag // 4 or 1}")
    if schedule.max_lag == 0 and schedule.minibatches * schedule.epochs == 1:
        return found
    return [*found, *cfg.algo.corrections()]
