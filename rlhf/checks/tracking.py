"""Check of the tracking server of a run. This module imports no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlhf.core.errors import UserError
from rlhf.core.network import refusal
from rlhf.core.secrets import hide

if TYPE_CHECKING:
    from rlhf.config.root import Config


def check_tracking(cfg: Config) -> None:
    """Connect to the tracking server of MLflow, if the run uses one.

    Call this function in the process of the job, which may run on another machine than the command.

    Raises:
        UserError: the server refuses connections.
    """
    if cfg.logger.mlflow is None:
        return
    uri = cfg.logger.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    key = "logger.mlflow.uri" if cfg.logger.mlflow.uri else "MLFLOW_TRACKING_URI"
    if uri.startswith(("http://", "https://")) and (reason := refusal(uri)):
        raise UserError(
            f"{key} must be the address of a server that accepts connections ({reason}), got {hide(uri)}; "
            "start the server, correct the address, or leave logger=mlflow out"
        )
