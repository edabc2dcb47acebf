"""Sections of the loggers: missing packages, addresses of stores."""

import importlib.util

import pytest

from rlhf.checks.check import problems
from rlhf.words.compose import compose


@pytest.mark.parametrize(
    ("name", "module"),
    [("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("trackio", "trackio")],
)
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(name, module, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    (problem,) = problems(compose([f"logger={name}"]))
    assert f"logger={name} needs the package {module}" in problem and f"pip install -e '.[{name}]'" in problem


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns"])
def test_mlflow_needs_a_server_or_a_database(uri):
    (problem,) = problems(compose(["logger=mlflow", f"logger.mlflow.uri={uri}"]))
    assert (
        problem.startswith("logger.mlflow.uri must")
        and "set logger.mlflow.uri=sqlite:///mlflow.db" in problem
    )


def test_addresses_of_mlflow_without_secrets_are_accepted():
    for uri in ("http://host:5000", "sqlite:///mlflow.db", "postgresql://host/db", "databricks"):
        assert not problems(compose(["logger=mlflow", f"logger.mlflow.uri='{uri}'"])), uri


def test_a_password_in_the_address_of_mlflow_is_refused_without_showing_it():
    (problem,) = problems(compose(["logger=mlflow", "logger.mlflow.uri='http://me:hunter2@host'"]))
    assert "logger.mlflow.uri must not contain a user name or password" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize("variable", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"])
def test_trackio_needs_a_local_store(variable, monkeypatch):
    monkeypatch.setenv(variable, "me/space")
    (problem,) = problems(compose(["logger=trackio"]))
    assert f"unset {variable}" in problem


def test_the_folder_of_trackio_must_be_writable(tmp_path):
    (tmp_path / "file").touch()
    (problem,) = problems(compose(["logger=trackio", f"logger.trackio.dir={tmp_path}/file"]))
    assert problem.startswith("logger.trackio.dir must")
