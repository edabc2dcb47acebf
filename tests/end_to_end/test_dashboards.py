"""Tests of MLflow and trackio with real local stores, and of the figures that dashboards get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.loggers.dashboards import import_trackio, run_id, stored_id
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import interrupted, rows
from tests.end_to_end.test_loggers import SESSIONS

if TYPE_CHECKING:
    from mlflow import MlflowClient

SECRET = "a-secret-password"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Return the folder of the trackio store, which a process uses for all its runs."""
    folder = tmp_path_factory.mktemp("trackio")
    import_trackio(folder)
    return folder


def points(folder: RunFolder, store: Path | None = None) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each metric in MLflow, or in the trackio store."""
    if store is not None:
        trackio = import_trackio(store)
        found: dict[str, list] = {}
        for row in trackio.SQLiteStorage.get_logs("rlhf", run_id(folder, "trackio")):
            for name in row.keys() - {"step", "timestamp"}:
                found.setdefault(name, []).append((row["step"], row[name]))
        return found
    client, mlflow_run = client_of(folder)
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(mlflow_run, name)]
        for name in client.get_run(mlflow_run).data.metrics
    }


def client_of(folder: RunFolder) -> tuple[MlflowClient, str]:
    """Return a client of the default store of a run, and the id of its MLflow run."""
    from mlflow import MlflowClient  # the import takes seconds

    name = stored_id(folder, "mlflow")
    assert name is not None
    return MlflowClient(f"sqlite:///{folder.path.parent}/mlflow/mlflow.db"), name


def expected(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """Return the updates and values of each metric in metrics.jsonl, each update once."""
    found: dict[str, dict[int, float]] = {}
    for row in rows(folder):
        for name, value in row.items():
            found.setdefault(name, {})[row["update"]] = value
    return {name: sorted(values.items()) for name, values in found.items()}


def without_timing(found: dict[str, list]) -> dict[str, list]:
    """Return points without tables, and without the metrics that differ between sessions."""
    left_out = ("time/", "throughput/", "memory/", "completions")
    return {name: sorted(values) for name, values in found.items() if not name.startswith(left_out)}


def completions(folder: RunFolder, update: int) -> list[dict]:
    """Return the completions of an evaluation in completions.jsonl, without the update."""
    found = [row for row in read_lines(folder.completions) if row.pop("update") == update]
    assert found and {"prompt", "response", "score", "gold_score"} <= found[0].keys()
    return found


def test_a_resumed_run_continues_in_mlflow_and_trackio_with_each_update_once(
    tiny, tmp_path, store, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    monkeypatch.setattr(sys, "argv", ["train.py", f"some.api_key={SECRET}"])
    folder = RunFolder(tmp_path / "run")
    cfg = tiny("logger=[mlflow,trackio]", f"logger.trackio.dir={store}", *SESSIONS)
    with interrupted(update=3):
        run(cfg, folder)
    client, mlflow_run = client_of(folder)
    assert client.get_run(mlflow_run).info.status == "KILLED"
    assert [step for step, _ in points(folder)["update"]] == [0, 1, 2, 3], "one is after the checkpoint"
    run(cfg, folder)

    assert client_of(folder)[1] == mlflow_run
    assert without_timing(points(folder)) == expected(folder)
    assert without_timing(points(folder, store)) == expected(folder)

    info = client.get_run(mlflow_run)
    assert info.info.status == "FINISHED" and info.info.run_name == "run"
    assert info.data.params["algo.name"] == "dpo" and info.data.params["schedule.save_every"] == "2.0"
    folders = ("completions", "figures")
    artifacts = [{file.path for file in client.list_artifacts(mlflow_run, name)} for name in folders]
    assert artifacts[0] == {f"completions/update-{update}.json" for update in (0, 2, 4)}
    assert "figures/learning_curves.png" in artifacts[1]
    tables = dict(points(folder, store)["completions"])
    for update in (0, 2, 4):
        file = client.download_artifacts(mlflow_run, f"completions/update-{update}.json", str(tmp_path))
        table = json.loads(Path(file).read_text())
        seen = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert seen == tables[update]["_value"] == completions(folder, update)

    for file in [*tmp_path.rglob("*"), *store.rglob("*")]:
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert not Path("mlruns").exists() and not Path("mlflow.db").exists()


def test_rows_that_a_store_lacks_are_sent_when_the_run_resumes(tiny, tmp_path, store, monkeypatch):
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")  # as on a network file system
    folder = RunFolder(tmp_path / "run")
    cfg = tiny("logger=[mlflow,trackio]", f"logger.trackio.dir={store}", *SESSIONS)
    with interrupted(update=3):
        run(cfg, folder)
    client, deleted = client_of(folder)
    client.delete_run(deleted)
    run(cfg, folder)
    trackio = import_trackio(store)
    trackio.fragments.import_inbox_dir()  # as the dashboard does
    names = [each["name"] for each in trackio.SQLiteStorage.get_run_records("rlhf")]
    assert names.count(run_id(folder, "trackio")) == 1
    assert without_timing(points(folder)) == expected(folder)
    assert without_timing(points(folder, store)) == expected(folder)
    mlflow_run = client_of(folder)[1]
    assert mlflow_run != deleted
    assert len(client.list_artifacts(mlflow_run, "completions")) == 3
    assert [step for step, _ in points(folder, store)["completions"]] == [0, 2, 4]


def test_another_trackio_folder_in_the_same_process_is_an_error_with_a_remedy(tmp_path, store):
    with pytest.raises(UserError, match=rf"logger\.trackio\.dir must .*set logger\.trackio\.dir={store}"):
        import_trackio(tmp_path)


def test_a_store_that_mlflow_cannot_open_is_an_error_without_its_password(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"nosuch://me:{SECRET}@host/db")
    with pytest.raises(UserError, match="correct logger.mlflow.uri or the variable") as refused:
        run(tiny("logger=mlflow"), RunFolder(tmp_path / "run"))
    assert SECRET not in str(refused.value) and not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.process
def test_processes_that_open_a_new_mlflow_store_at_the_same_time_share_it(tmp_path):
    script = """
import sys
from pathlib import Path
from rlhf.config.run import MlflowConfig
from rlhf.core.state import TrainState
from rlhf.loggers.logger import LoggerContext
from rlhf.loggers.dashboards import MlflowLogger
from rlhf.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.path.mkdir()
folder.config.write_text("seed: 1")
folder.environment.write_text("{}")
state = TrainState(num_updates=1, update=1)
logger = MlflowLogger(MlflowConfig(), LoggerContext(folder=folder, state=state, figures=dict))
logger.log({"update": 1}, state)
logger.close()
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / name)], stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two")
    ]
    for process in started:
        assert process.wait() == 0 and process.stderr is not None, process.communicate()
        assert "INFO" not in process.stderr.read()
    for name in ("one", "two"):
        client, mlflow_run = client_of(RunFolder(tmp_path / name))
        assert client.get_run(mlflow_run).data.metrics == {"update": 1.0}
