"""Checks in the process of a job, which may run on another machine than the command.

This module imports no torch; the user's reward functions and hooks may.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import training_rule
from rlhf.config.address import class_problem
from rlhf.config.root import Config
from rlhf.config.schema import sections
from rlhf.core.errors import UserError
from rlhf.core.launched import is_first_rank
from rlhf.loggers.hooks import Hook, load_hooks


@training_rule
def hooks_exist(cfg: Config) -> Iterator[str]:
    """Yield an error for each hook whose class is not found."""
    for path in cfg.hooks:
        if problem := class_problem("hooks", path):
            yield problem


def check_job(cfg: Config) -> list[Hook]:
    """Import the user's code, connect to services and trackers, and return the hooks of this rank.

    Raises:
        UserError: the code cannot be imported or called, or a service refuses connections.
    """
    found = [problem for key, section in sections(cfg) for problem in section.job_problems(key)]
    if found:
        raise UserError(*found)
    return load_hooks(cfg.hooks) if is_first_rank() else []
