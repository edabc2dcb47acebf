"""Loggers of dashboards: W&B, MLflow, trackio, TensorBoard."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlhf.config.run import MlflowConfig, TensorboardConfig, TrackioConfig, WandbConfig
from rlhf.core.errors import UserError
from rlhf.core.files import flat, read_lines, write_atomically
from rlhf.core.formatting import hide
from rlhf.core.launched import exported
from rlhf.core.state import TrainState
from rlhf.loggers.logger import Logger, LoggerContext
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import made_by_one
from rlhf.terminal.console import say

if TYPE_CHECKING:
    from rlhf.core.metrics import Evaluation, Row


# What every dashboard gets about a run: its id, which the run folder stores, and its settings.


def run_id(folder: RunFolder, dashboard: str, value: str | None = None) -> str:
    """Return the id of the run in a dashboard; the first call creates the id and stores it in the run folder.

    The name of the folder is not a unique id: a run that `resume=never` starts again has the same name, and a
    run in another `output_dir` may have the same name. With equal ids, the rows of such runs would be mixed.

    Args:
        folder: the run folder.
        dashboard: the option of the config group `logger`.
        value: the id to store; None: the stored id, or a new one.
    """
    if value is None and (stored := stored_id(folder, dashboard)) is not None:
        return stored
    name = re.sub(r"[/\\#?%:]", "-", folder.path.name)[:100]  # forbidden at W&B; at most 128 characters
    value = value or f"{name}-{secrets.token_hex(4)}"
    file = folder.path / dashboard / "run_id"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{value}\n")
    return value


def stored_id(folder: RunFolder, dashboard: str) -> str | None:
    """Return the stored id of the run in a dashboard; None: there is none yet."""
    file = folder.path / dashboard / "run_id"
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def _described(folder: RunFolder) -> dict[str, Any]:
    """Return config.yaml and environment.json of the run as one dictionary; neither contains secrets."""
    environment = json.loads(folder.environment.read_text(encoding="utf-8"))
    return {**folder.read_config(), "environment": environment}


# The bases of the loggers: a dashboard, and a dashboard whose run is continued by the rows that it lacks.


_COMPLETIONS = "completions"  # name of the tables of completions, beside the names of metrics

_Samples = list[dict[str, Any]]  # completions of an evaluation, with the keys of completions.jsonl


class _Dashboard(Logger):
    """A logger that sends rows and completions to another program.

    A subclass starts or continues the run of the dashboard in its constructor, and ends it in `close`.
    """

    def send(self, row: Row, samples: _Samples, update: int) -> None:
        """Send metrics of an update, or of the evaluation at an update with its completions."""
        raise NotImplementedError

    def log(self, row: Row, state: TrainState) -> None:
        """Send the metrics of an update."""
        self.send(row, [], state.update)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Send the metrics of an evaluation, and its completions."""
        self.send(row, evaluation.samples, state.update)


class ContinuedDashboard(_Dashboard):
    """A dashboard that gets each metric of an update once, over all sessions of a run.

    A resumed run repeats the updates after its checkpoint; the values that the store has are not sent again.
    Rows that the store lacks are read from metrics.jsonl and completions.jsonl when the run resumes.

    If the store refuses a row, the run continues with a warning. The logger sends the row again at the next
    checkpoint, at the end of the run, or when the run resumes.

    Args:
        name: the option of the config group `logger`.
        folder: the run folder.
        last: the last update of each metric in the store, and of the tables of completions (`_COMPLETIONS`).
        refusals: the exceptions of a store that refuses a row.
    """

    def __init__(
        self, name: str, folder: RunFolder, last: dict[str, int], refusals: tuple[type[Exception], ...] = ()
    ) -> None:
        self.name, self.folder, self.last, self.refusals = name, folder, last, refusals
        self.refused = False  # the store refused a row, and nothing was sent after that

    def store(self, row: Row, samples: _Samples, update: int) -> None:
        """Send metrics of an update, or completions, to the store."""
        raise NotImplementedError

    def save(self, checkpoint: Path) -> None:
        """Send the rows that the store refused, if any, again."""
        if self.refused:
            self.send_missing()

    def send_missing(self) -> None:
        """Send the rows of metrics.jsonl and completions.jsonl that the store does not have."""
        self.refused = False
        for row in read_lines(self.folder.metrics, ["update"]):
            self.send(row, [], row["update"])
        evaluated: dict[int, _Samples] = {}
        for sample in read_lines(self.folder.completions, ["update"]):
            evaluated.setdefault(sample.pop("update"), []).append(sample)
        for update, samples in evaluated.items():
            self.send({}, samples, update)

    def send(self, row: Row, samples: _Samples, update: int) -> None:
        """Send the metrics and the completions that the store does not have."""
        new = {name: value for name, value in row.items() if update > self.last.get(name, -1)}
        if new:
            self.attempt(lambda: self.store(new, [], update), new, update)
        if samples and update > self.last.get(_COMPLETIONS, -1):
            self.attempt(lambda: self.store({}, samples, update), [_COMPLETIONS], update)

    def attempt(self, send: Callable[[], None], names: Iterable[str], update: int) -> None:
        """Send the values `names` of an update, unless the store refused an earlier row."""
        if self.refused:
            return
        try:
            send()
        except self.refusals as error:
            self.refused = True
            reason = hide(str(error).partition("\n")[0])
            problem = f"logger={self.name} did not accept the metrics of update {update} ({reason})"
            then = "the run continues, and sends them again at its next checkpoint and at its end"
            say(f"warning: {problem}; {then}", style="yellow")
        else:
            self.last |= dict.fromkeys(names, update)


# The logger of Weights & Biases (W&B).


class WandbLogger(_Dashboard):
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

        folder, self.wandb = context.folder, wandb
        self.state, self.figures = context.state, context.figures
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
                config=_described(folder),
                # the metadata of W&B include the command line, which may contain secrets
                settings=wandb.Settings(x_disable_meta=True),
            )
        except wandb.errors.Error as error:
            rule = "logger=wandb needs Weights & Biases to accept the run"
            later = "set logger.wandb.mode=offline and send it later with `wandb sync`"
            remedy = f"log in with `wandb login`, {later}, or leave logger=wandb out"
            raise UserError(f"{rule}, got: {error}; {remedy}") from None

    def send(self, row: Row, samples: _Samples, update: int) -> None:
        """Send the row, and a table of completions, with the update as their step."""
        sent: dict[str, Any] = dict(row)
        if samples:
            columns: list[Any] = list(samples[0])
            sent["completions"] = self.wandb.Table(columns, [[each[c] for c in columns] for each in samples])
        self.run.log(sent, step=update)

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


# The logger of MLflow.


_SQLITE = "sqlite:///"
_VARIABLES = {  # read when MLflow is imported or used; the user may set other values
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow reports its use otherwise
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # about 15 seconds without a server; the default 7 take 4 minutes
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the address may contain a password
}
_PARAMS = 100  # largest number of parameters of a request
_TABLE = re.compile(r"completions/update-(\d+)\.json")  # artifact of the completions of an evaluation


class MlflowLogger(ContinuedDashboard):
    """A logger that sends rows, tables of completions and figures to an MLflow run.

    The parameters of the MLflow run are the settings of the run when it started; the artifact `config.json`
    has the settings and the environment of the last session. A resumed run continues the same MLflow run.

    Args:
        config: the config section of the logger.
        context: the run folder, the counters and the figures of the run.

    Raises:
        UserError: MLflow does not accept the run, for example because no server answers.
    """

    config: MlflowConfig

    def __init__(self, config: MlflowConfig, context: LoggerContext) -> None:
        for variable, value in _VARIABLES.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
        self.context = context
        store = context.folder.path.absolute().parent / "mlflow" / "mlflow.db"  # of all runs in that folder
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{store}"
        file = Path(uri.removeprefix(_SQLITE)).absolute() if uri.startswith(_SQLITE) else None
        try:
            # MLflow creates the tables of a new store without a lock
            with nullcontext() if file is None else made_by_one(file):
                self.client = MlflowClient(uri)
                artifacts = None if file is None else (file.parent / "artifacts").as_uri()
                experiment = self.experiment(config.experiment, artifacts)
            self.run = self.open(context.folder, experiment)
            last = {
                name: max(point.step for point in self.client.get_metric_history(self.run, name))
                for name in self.client.get_run(self.run).data.metrics
            }
            files = [file.path for file in self.client.list_artifacts(self.run, _COMPLETIONS)]
            tables = [int(table[1]) for table in map(_TABLE.fullmatch, files) if table]
            last[_COMPLETIONS] = max(tables, default=-1)
            super().__init__("mlflow", context.folder, last, (MlflowException, OSError))
        # ImportError: the driver of a database is not installed
        except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:
            reason = hide(str(error).partition("\n")[0])
            rule = "logger=mlflow needs a store that accepts the run"
            remedy = "correct logger.mlflow.uri or the variable MLFLOW_TRACKING_URI"
            raise UserError(f"{rule}, got: {reason}; {remedy}, or leave logger=mlflow out") from None
        self.send_missing()

    def experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment `name`, which is created if necessary.

        Args:
            name: the experiment.
            artifacts: address of the artifacts of a new experiment; None: the server decides.
        """
        from mlflow.exceptions import MlflowException

        if (found := self.client.get_experiment_by_name(name)) is None:
            try:
                return self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException:  # another run may have created the experiment in the meantime
                if (found := self.client.get_experiment_by_name(name)) is None:
                    raise
        return found.experiment_id

    def open(self, folder: RunFolder, experiment: str) -> str:
        """Return the id of the MLflow run, which is created or continued, with the settings of the run."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        found, stored = None, stored_id(folder, "mlflow")
        try:
            found = None if stored is None else self.client.get_run(stored)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        if found is None or found.info.lifecycle_stage != "active":  # there is none, or it was deleted
            found = self.client.create_run(experiment, run_name=folder.path.name)
        run = run_id(folder, "mlflow", found.info.run_id)
        self.client.update_run(run, status="RUNNING")
        self.client.log_dict(run, _described(folder), "config.json")
        settings = flat(folder.read_config())  # MLflow forbids some characters in names
        params = [(re.sub(r"[^\w\-. :/]", "-", key), str(value)) for key, value in settings]
        new = [Param(*each) for each in params if each[0] not in found.data.params]  # cannot be changed
        for start in range(0, len(new), _PARAMS):
            self.client.log_batch(run, params=new[start : start + _PARAMS])
        return run

    def store(self, row: Row, samples: _Samples, update: int) -> None:
        """Send metrics, or completions as an artifact in the format of a pandas table (`orient="split"`)."""
        from mlflow.entities import Metric

        if samples:
            columns = list(samples[0])
            table = {"columns": columns, "data": [[sample[name] for name in columns] for sample in samples]}
            self.client.log_dict(self.run, table, f"{_COMPLETIONS}/update-{update}.json")
        else:
            now = int(time.time() * 1000)
            metrics = [Metric(name, value, now, update) for name, value in row.items()]
            self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        """End the MLflow run, with the figures of a run that is complete.

        An interrupted run is shown as killed until it is resumed.
        """
        done = self.context.state.done

        def end() -> None:
            if done and (figures := self.context.figures()):
                with TemporaryDirectory() as scratch:
                    for name, png in figures.items():
                        Path(scratch, f"{name}.png").write_bytes(png)
                    self.client.log_artifacts(self.run, scratch, "figures")
            self.client.set_terminated(self.run, "FINISHED" if done else "KILLED")

        if done and self.refused:
            self.send_missing()
        self.attempt(end, [], self.context.state.update)


# The logger of trackio.


_FOLDER = "TRACKIO_DIR"  # the variable of the folder of the store


class TrackioLogger(ContinuedDashboard):
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
        default = os.environ.get(_FOLDER) or context.folder.path.parent / "trackio"
        self.trackio = import_trackio(Path(config.dir or default).absolute())
        name = run_id(context.folder, "trackio")
        # rows of an earlier session on a network file system, which no dashboard has imported yet
        self.trackio.fragments.import_inbox_dir()
        with redirect_stdout(StringIO()):  # instructions for another way to start the dashboard
            try:
                self.run = self.trackio.init(
                    config.project,
                    name=name,
                    config=_described(context.folder),
                    resume="allow",
                    embed=False,
                    auto_log_cpu=False,
                    auto_log_gpu=False,
                )
            except ValueError as error:
                rule = f"logger.trackio.project must be a name that trackio accepts ({error})"
                raise UserError(f"{rule}, got {config.project}; set logger.trackio.project=rlhf") from None
        last: dict[str, int] = {}
        for row in self.trackio.SQLiteStorage.get_logs(config.project, name):
            last |= {metric: max(row["step"], last.get(metric, -1)) for metric in row}
        super().__init__("trackio", context.folder, last)
        self.send_missing()

    def store(self, row: Row, samples: _Samples, update: int) -> None:
        """Write metrics or a table of completions, with the update as their step."""
        table = {_COMPLETIONS: self.trackio.Table(data=samples)} if samples else {}
        self.run.log({**row, **table}, step=update)

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
    with exported(_FOLDER, str(folder)):
        import trackio
    if folder != (used := trackio.utils.TRACKIO_DIR):
        rule = f"logger.trackio.dir must be the same for all runs of a process ({used})"
        raise UserError(f"{rule}, got {folder}; set logger.trackio.dir={used}")
    # The name of the user is otherwise requested from the hub if the user is logged in there.
    setattr(trackio.Run, "_get_username", lambda run: None)  # noqa: B010
    return trackio


# The logger of TensorBoard event files.


class TensorboardLogger(_Dashboard):
    """A logger of scalars, with the update as x axis.

    After a resume, events newer than the checkpoint are hidden.

    Args:
        config: the config section of the logger.
        context: the run folder and the counters of the run.
    """

    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            context.folder.path / "tensorboard",
            flush_secs=config.flush_secs,
            purge_step=context.state.update + 1 if context.state.update else 0,
        )

    def send(self, row: Row, samples: _Samples, update: int) -> None:
        """Write each metric of the row as a scalar, and the first completion as text."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, update)
        for sample in samples[:1]:
            text = f"{sample['prompt']}\n\n**{sample['response']}**"
            self.writer.add_text("completion", text, update)

    def close(self) -> None:
        """Write buffered events and close the event file."""
        self.writer.close()
