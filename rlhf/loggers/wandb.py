"""Weights & Biases."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.config.logger import WandbConfig
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


class WandbLogger(Logger):
    """Rows by update, completions as a table, config and environment.json as the run's config.

    Each session of a run goes on in the same run of W&B, which has the run folder's name. Rows that a session
    makes anew, from its checkpoint on, are equal to those that are there, and W&B leaves them out.

    Raises:
        UserError: W&B does not take the run, for want of a key for example.
    """

    def __init__(self, config: WandbConfig, folder: RunFolder, state: TrainState) -> None:
        import wandb

        self.wandb = wandb
        self.state = state
        try:
            self.run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                mode=None if config.mode is None else config.mode.value,
                dir=folder.path,
                id=run_id(folder),
                name=folder.path.name,
                resume="allow",
                config=described(folder),
                # what W&B collects of itself has the command line in it, secrets included
                settings=wandb.Settings(x_disable_meta=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logger=wandb needs Weights & Biases to take the run, got: {error}; log in with "
                "`wandb login`, set logger.wandb.mode=offline and send it later with `wandb sync`, or leave "
                "logger=wandb out"
            ) from error

    def log(self, row: Row, state: TrainState) -> None:
        """Log the row at its update."""
        self.run.log(row, step=state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Log the row, and a table of completions."""
        columns: list[Any] = list(evaluation.samples[0]) if evaluation.samples else []
        table = self.wandb.Table(columns, [[sample[c] for c in columns] for sample in evaluation.samples])
        self.run.log({**row, "completions": table} if columns else row, step=state.update)

    def close(self) -> None:
        """End the session; one that was cut short is shown as failed until the run goes on."""
        self.run.finish(exit_code=0 if self.state.done else 1)


def run_id(folder: RunFolder) -> str:
    """The id of the run at W&B: made once, kept in the folder for the sessions to come.

    The folder's name alone would not do: a run that `resume=never` starts again has it too, and so may one in
    another `output_dir`, and W&B would take their rows for those of the first.
    """
    file = folder.path / "wandb" / "run_id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[/\\#?%:]", "-", folder.path.name)[:100]  # W&B: none of these, 128 characters
        write_atomically(file, f"{name}-{secrets.token_hex(4)}\n")
    return file.read_text(encoding="utf-8").strip()


def described(folder: RunFolder) -> dict[str, Any]:
    """The resolved config, and what the run ran with."""
    return {
        **folder.read_config(),
        "environment": json.loads(folder.environment.read_text(encoding="utf-8")),
    }
