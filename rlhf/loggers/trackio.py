"""The logger of trackio."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError
from rlhf.loggers.continued import COMPLETIONS, ContinuedLogger, Samples
from rlhf.loggers.dashboards import described, run_id

if TYPE_CHECKING:
    from rlhf.config.logger import TrackioConfig
    from rlhf.core.metrics import Row
    from rlhf.loggers.logger import LoggerContext

FOLDER = "TRACKIO_DIR"  # the variable of the folder of the store


class TrackioLogger(ContinuedLogger):
    """A logger that writes rows and tables of completions to a local store of trackio.

    The name of the trackio run is the name of the run folder and a random suffix. A resumed run continues the
    same trackio run. The logger starts no server and does not connect to the hub.

    Args:
        config: the config section of the logger.
        context: the run folder.

    Raises:
        UserError: trackio does not accept the name of the project, or uses another folder in this process.
    """

    config: TrackioConfig

    def __init__(self, config: TrackioConfig, context: LoggerContext) -> None:
        default = os.environ.get(FOLDER) or context.folder.path.parent / "trackio"
        self.trackio = import_trackio(Path(config.dir or default).absolute())
        name = run_id(context.folder, "trackio")
        # rows of an earlier session on a network file system, which no dashboard has imported yet
        self.trackio.fragments.import_inbox_dir()
        with redirect_stdout(StringIO()):  # instructions for another way to start the dashboard
            try:
                self.run = self.trackio.init(
                    config.project,
                    name=name,
                    config=described(context.folder),
                    resume="allow",
                    embed=False,
                    auto_log_cpu=False,
                    auto_log_gpu=False,
                )
            except ValueError as error:
                raise UserError(
                    f"logger.trackio.project must be a name that trackio accepts ({error}), got "
                    f"{config.project}; set logger.trackio.project=rlhf"
                ) from None
        last: dict[str, int] = {}
        for row in self.trackio.SQLiteStorage.get_logs(config.project, name):
            last |= {metric: max(row["step"], last.get(metric, -1)) for metric in row}
        super().__init__("trackio", context.folder, last)
        self.send_missing()

    def send(self, row: Row, update: int) -> None:
        """Write metrics of an update, with the update as their step."""
        self.run.log(row, step=update)

    def send_completions(self, samples: Samples, update: int) -> None:
        """Write completions as a table."""
        self.run.log({COMPLETIONS: self.trackio.Table(data=samples)}, step=update)

    def close(self) -> None:
        """Wait until all rows are written, and end the trackio run."""
        with redirect_stdout(StringIO()):
            self.trackio.finish()


def import_trackio(folder: Path) -> Any:
    """Import trackio, which reads the folder of its store from a variable when it is imported.

    Args:
        folder: absolute path of the folder.

    Raises:
        UserError: trackio was imported with another folder.
    """
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)
    try:
        import trackio
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before
    if folder != (used := trackio.utils.TRACKIO_DIR):
        raise UserError(
            f"logger.trackio.dir must be the same for all runs of a process ({used}), got {folder}; "
            f"set logger.trackio.dir={used}"
        )
    # The name of the user is otherwise requested from the hub if the user is logged in there.
    setattr(trackio.Run, "_get_username", lambda run: None)  # noqa: B010
    return trackio
