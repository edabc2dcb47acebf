"""The lists of rules over the whole config, and the decorators that put a rule on a list.

A rule is a generator function of the config that yields error messages (or, for `@doubt`, warnings). A
plug-in may decorate rules of its own in the module that registers its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf.config.root import Config

Rule = Callable[[Config], Iterator[str]]

RULES: list[Rule] = []  # of every run
TRAINING_RULES: list[Rule] = []  # of a run that trains; evaluating a finished run skips them
DOUBTS: list[Rule] = []  # settings that are allowed but have no effect, or are doubtful


def rule(check: Rule) -> Rule:
    """Check every run by `check`, whether it trains or is only evaluated."""
    RULES.append(check)
    return check


def training_rule(check: Rule) -> Rule:
    """Check every run that trains by `check`."""
    TRAINING_RULES.append(check)
    return check


def doubt(check: Rule) -> Rule:
    """Show the messages of `check` as warnings."""
    DOUBTS.append(check)
    return check
