"""The logger of MLflow."""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf.config.yaml_file import flat
from rlhf.core.errors import UserError
from rlhf.core.secrets import hide
from rlhf.loggers.continued import COMPLETIONS, ContinuedLogger, Samples
from rlhf.loggers.dashboards import described, store_id, stored_id
from rlhf.runs.lock import made_by_one

if TYPE_CHECKING:
    from rlhf.config.logger import MlflowConfig
    from rlhf.core.metrics import Row
    from rlhf.loggers.logger import LoggerContext
    from rlhf.runs.folder import RunFolder

_SQLITE = "sqlite:///"
_VARIABLES = {  # read when MLflow is imported or used; the user may set other values
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow reports its use otherwise
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # about 15 seconds without a server; the default 7 take 4 minutes
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the address may contain a password
}
_PARAMS = 100  # largest number of parameters of a request
TABLE = re.compile(r"completions/update-(\d+)\.json")  # artifact of the completions of an evaluation


class MlflowLogger(ContinuedLogger):
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
            super().__init__("mlflow", context.folder, self.sent(), (MlflowException, OSError))
        # ImportError: the driver of a database is not installed
        except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:
            reason = hide(str(error).partition("\n")[0])
            raise UserError(
                f"logger=mlflow needs a store that accepts the run, got: {reason}; correct logger.mlflow.uri "
                "or the variable MLFLOW_TRACKING_URI, or leave logger=mlflow out"
            ) from None
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
        run = stored_id(folder, "mlflow")
        if run is None or not self.exists(run):
            run = self.client.create_run(experiment, run_name=folder.path.name).info.run_id
            store_id(folder, "mlflow", run)
        self.client.update_run(run, status="RUNNING")
        self.client.log_dict(run, described(folder), "config.json")
        known = self.client.get_run(run).data.params  # cannot be changed
        settings = flat(folder.read_config())  # MLflow forbids some characters in names
        params = [(re.sub(r"[^\w\-. :/]", "-", key), str(value)) for key, value in settings]
        self.log_params(run, [(key, value) for key, value in params if key not in known])
        return run

    def exists(self, run: str) -> bool:
        """Return whether the store has an MLflow run that is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def log_params(self, run: str, params: list[tuple[str, str]]) -> None:
        """Send parameters in requests of at most `_PARAMS` parameters."""
        from mlflow.entities import Param

        for start in range(0, len(params), _PARAMS):
            self.client.log_batch(run, params=[Param(*each) for each in params[start : start + _PARAMS]])

    def sent(self) -> dict[str, int]:
        """Return the last update of each metric, and of the completions, in the MLflow run."""
        names = self.client.get_run(self.run).data.metrics
        last = {
            name: max(point.step for point in self.client.get_metric_history(self.run, name))
            for name in names
        }
        tables = [TABLE.fullmatch(file.path) for file in self.client.list_artifacts(self.run, COMPLETIONS)]
        return last | {COMPLETIONS: max((int(table[1]) for table in tables if table), default=-1)}

    def send(self, row: Row, update: int) -> None:
        """Send metrics of an update, with the update as their step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, update) for name, value in row.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def send_completions(self, samples: Samples, update: int) -> None:
        """Send completions as an artifact, in the format of a pandas table (`orient="split"`)."""
        columns = list(samples[0])
        table = {"columns": columns, "data": [[sample[name] for name in columns] for sample in samples]}
        self.client.log_dict(self.run, table, f"{COMPLETIONS}/update-{update}.json")

    def close(self) -> None:
        """End the MLflow run; an interrupted run is shown as killed until it is resumed."""
        done = self.context.state.done
        if done and self.refused:
            self.send_missing()
        self.attempt(lambda: self.end(done), [], self.context.state.update)

    def end(self, done: bool) -> None:
        """Set the final status of the MLflow run; send the figures of a run that is complete."""
        if done and (figures := self.context.figures()):
            with TemporaryDirectory() as scratch:
                for name, png in figures.items():
                    Path(scratch, f"{name}.png").write_bytes(png)
                self.client.log_artifacts(self.run, scratch, "figures")
        self.client.set_terminated(self.run, "FINISHED" if done else "KILLED")
