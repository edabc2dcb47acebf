"""Tests of the check of reward functions and services in the process of the job."""

from __future__ import annotations

import socket

import pytest

from rlhf.checks.job import check_job
from rlhf.config.compose import compose
from rlhf.core import network
from rlhf.core.errors import UserError


@pytest.fixture
def listening():
    """Return the address of a port on this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/score"


def test_a_reward_function_is_imported_in_the_process_of_the_job(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(p, r, a): return 0.0\nraise ValueError('no licence')\n")
    cfg = compose(["scorer=function", f"scorer.path={file}:score"])
    with pytest.raises(UserError, match=f"raised ValueError: no licence, in {file}, line 2"):
        check_job(cfg)


def test_a_service_that_refuses_connections_is_a_user_error(listening):
    check_job(compose(["scorer=http", f"scorer.url={listening}"]))
    cfg = compose(["scorer@gold=http", "gold.url=http://127.0.0.1:9/score"])
    with pytest.raises(UserError) as refused:
        check_job(cfg)
    text = str(refused.value)
    assert "gold.url must be the address of a service that accepts connections (Connection refused)" in text
    assert ", got http://127.0.0.1:9/score; start the service" in text


def test_a_service_behind_a_proxy_is_not_tried(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert network.refusal("http://no-such-host.invalid/score") is None
    assert network.refusal("http://127.0.0.1:9/score") == "Connection refused"


def test_a_slow_connection_is_not_refused(monkeypatch):
    def late(*_):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", late)
    assert network.refusal("http://127.0.0.1:9/score") is None


def test_a_refused_run_leaves_no_folder(command, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def score(p, r, a): return 0.0\nraise ValueError('no licence')\n")
    answer = command("scorer=function", "scorer.path=own.py:score")
    assert answer.code == 2 and "no licence" in answer.err and not answer.runs
    assert not list(tmp_path.glob("outputs/*"))
