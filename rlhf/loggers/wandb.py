"""The logger of Weights & Biases (W&B)."""

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
    from rlhf.loggers.logger import LoggerContext
    from rlhf.runs.folder import RunFolder


class WandbLogger(Logger):
    """A logger that sends rows and tables of completions to a W&B run, with the update as x axis.

    The config of the W&B run contains config.yaml and environment.json. A resumed run continues the same W&B
    run, which has the name of the run folder. A resumed run repeats the rows after its checkpoint; these rows
    are equal to the existing rows, and W&B skips them.

    Args:
        config: the config section of the logger.
        context: the run folder and the counters of the run.

    Raises:
        UserError: W&B does not accept the run, for example without an API key.
    """

    config: WandbConfig

    def __init__(self, config: WandbConfig, context: LoggerContext) -> None:
        import wandb

        folder = context.folder
        self.wandb = wandb
        self.state = context.state
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
                # the metadata of W&B include the command line, which may contain secrets
                settings=wandb.Settings(x_disable_meta=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logger=wandb needs Weights & Biases to accept the run, got: {error}; log in with "
                "`wandb login`, set logger.wandb.mode=offline and send it later with `wandb sync`, or leave "
                "logger=wandb out"
            ) from error

    def log(self, row: Row, state: TrainState) -> None:
        """Send the row, with the update as its step."""
        self.run.log(row, step=state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Send the row and a table of completions, with the update as their step."""
        columns: list[Any] = list(evaluation.samples[0]) if evaluation.samples else []
        table = self.wandb.Table(columns, [[sample[c] for c in columns] for sample in evaluation.samples])
        self.run.log({**row, "completions": table} if columns else row, step=state.update)

    def close(self) -> None:
        """Finish the W&B run; an interrupted run is shown as failed until it is resumed."""
        self.run.finish(exit_code=0 if self.state.done else 1)


def run_id(folder: RunFolder) -> str:
    """Return the id of the W&B run; the first call creates it and stores it in the run folder.

    The name of the folder is not a unique id: a run that `resume=never` starts again has the same name, and a
    run in another `output_dir` may have the same name. With equal ids, W&B would mix the rows of such runs.
    """
    file = folder.path / "wandb" / "run_id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[/\\#?%:]", "-", folder.path.name)[:100]  # forbidden characters; at most 128
        write_atomically(file, f"{name}-{secrets.token_hex(4)}\n")
    return file.read_text(encoding="utf-8").strip()


def described(folder: RunFolder) -> dict[str, Any]:
    """Return config.yaml and environment.json of the run as one dictionary."""
    return {
        **folder.read_config(),
        "environment": json.loads(folder.environment.read_text(encoding="utf-8")),
    }
