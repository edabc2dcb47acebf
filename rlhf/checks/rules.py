"""The lists of rules over the whole config, and the decorators that add a rule to a list.

A rule is a generator function of the config that yields error messages (or, for `@doubt`, warnings). A
plug-in may decorate rules of its own in the module that registers its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf.config.root import Config

Rule = Callable[[Config], Iterator[str]]

RULES: list[Rule] = []  # rules for every run
TRAINING_RULES: list[Rule] = []  # rules for a run that trains; evaluating a finished run skips them
DOUBTS: list[Rule] = []  # rules that warn of settings without effect and of doubtful settings


def rule(check: Rule) -> Rule:
    """Add `check` to the rules for every run, whether the run trains or is only evaluated."""
    RULES.append(check)
    return check


def training_rule(check: Rule) -> Rule:
    """Add `check` to the rules for runs that train."""
    TRAINING_RULES.append(check)
    return check


def doubt(check: Rule) -> Rule:
    """Add `check` to the rules whose messages are warnings."""
    DOUBTS.append(check)
    return check
