"""The logger of Weights & Biases (W&B)."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError
from rlhf.loggers.dashboards import described, run_id
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from rlhf.config.logger import WandbConfig
    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.loggers.logger import LoggerContext


class WandbLogger(Logger):
    """A logger that sends rows, tables of completions and figures to a W&B run, with the update as x axis.

    The config of the W&B run contains config.yaml and environment.json. A resumed run continues the same W&B
    run, which has the name of the run folder. A resumed run repeats the rows after its checkpoint; these rows
    are equal to the existing rows, and W&B skips them.

    Args:
        config: the config section of the logger.
        context: the run folder, the counters and the figures of the run.

    Raises:
        UserError: W&B does not accept the run, for example without an API key.
    """

    config: WandbConfig

    def __init__(self, config: WandbConfig, context: LoggerContext) -> None:
        import wandb

        folder = context.folder
        self.wandb = wandb
        self.state = context.state
        self.figures = context.figures
        try:
            self.run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                mode=None if config.mode is None else config.mode.value,
                dir=folder.path,
                id=run_id(folder, "wandb"),
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
            ) from None

    def log(self, row: Row, state: TrainState) -> None:
        """Send the row, with the update as its step."""
        self.run.log(row, step=state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Send the row and a table of completions, with the update as their step."""
        columns: list[Any] = list(evaluation.samples[0]) if evaluation.samples else []
        table = self.wandb.Table(columns, [[sample[c] for c in columns] for sample in evaluation.samples])
        self.run.log({**row, "completions": table} if columns else row, step=state.update)

    def close(self) -> None:
        """Finish the W&B run, with the figures of a run that is complete.

        An interrupted run is shown as failed until it is resumed.
        """
        if self.state.done and (figures := self.figures()):
            from PIL import Image  # installed with matplotlib, which draws the figures

            images = {f"report/{name}": Image.open(BytesIO(png)) for name, png in figures.items()}
            sent = {name: self.wandb.Image(image) for name, image in images.items()}
            self.run.log(sent, step=self.state.update)
        self.run.finish(exit_code=0 if self.state.done else 1)
