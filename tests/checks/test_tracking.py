"""The check of the tracking server of a run."""

import socket

import pytest

from rlhf.checks.check import check_job
from rlhf.core.errors import UserError
from rlhf.words.compose import compose


@pytest.fixture
def closed() -> str:
    """Return host and port that refuse connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_tracking_server_that_refuses_connections_is_an_error(closed):
    with pytest.raises(UserError, match=f"logger.mlflow.uri must .*got http://{closed}; start the server"):
        check_job(compose(["logger=mlflow", f"logger.mlflow.uri='http://{closed}'"]))


def test_the_password_in_the_variable_of_the_server_is_not_shown(closed, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{closed}")
    check_job(compose([]))
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI must") as refused:
        check_job(compose(["logger=mlflow"]))
    assert "hunter2" not in str(refused.value)


def test_a_local_store_needs_no_server():
    check_job(compose(["logger=[mlflow,trackio]"]))
