"""Check of the reward functions and services of a run. This module imports no torch; reward functions may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.address import load_function
from rlhf.config.http_scorer import HttpScorerConfig
from rlhf.config.scorer import FunctionScorerConfig, scorers
from rlhf.core.errors import UserError
from rlhf.core.network import refusal

if TYPE_CHECKING:
    from rlhf.config.root import Config


def check_rewards(cfg: Config) -> None:
    """Import the reward functions of a run, and connect to its services.

    Call this function in the process of the job, which may run on another machine than the command.

    Raises:
        UserError: a function cannot be imported or called, or a service refuses connections.
    """
    found: list[str] = []
    for at, scorer in scorers(cfg):
        if isinstance(scorer, FunctionScorerConfig):
            for path in scorer.paths:
                try:
                    load_function(f"{at}.path", path, scorer.arguments)
                except UserError as error:
                    found += error.problems
        if isinstance(scorer, HttpScorerConfig) and (reason := refusal(scorer.url or "")):
            found.append(
                f"{at}.url must be the address of a service that accepts connections ({reason}), got "
                f"{scorer.url}; start the service, or correct {at}.url"
            )
    if found:
        raise UserError(*found)
