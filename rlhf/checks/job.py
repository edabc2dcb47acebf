"""Checks in the process of a job, which may run on another machine than the command.

This module imports no torch; the user's reward functions and hooks may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.checks.hooks import load_hooks
from rlhf.checks.rewards import check_rewards
from rlhf.checks.tracking import check_tracking
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.loggers.hooks import Hook


def check_job(cfg: Config) -> list[Hook]:
    """Import the user's code, connect to services and trackers, and return the hooks of this rank.

    Raises:
        UserError: the code cannot be imported or called, or a service refuses connections.
    """
    check_rewards(cfg)
    check_tracking(cfg)
    return load_hooks(cfg) if is_first_rank() else []
