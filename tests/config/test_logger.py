"""Sections of the loggers: missing packages, addresses of stores."""

import pytest

from rlhf.checks.check import problems
from rlhf.words.compose import compose


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
