"""Whether the hub can be reached, and its cache of models."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from rlhf.core import machine


@pytest.fixture
def endpoint(monkeypatch):
    """Return a function that sets the address of the hub, and allow the use of the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda address: monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the address of a server that answers every request with an error."""

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_that_answers_is_reachable(endpoint, server):
    endpoint(server)
    assert machine.unreachable() is None, "an error status is an answer, too"


def test_a_refused_connection_is_reported_with_the_address(endpoint):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    endpoint(address)
    assert machine.unreachable() == f"no connection to {address} (ConnectionError)"


def test_a_server_that_does_not_answer_is_reported_after_the_timeout(endpoint, monkeypatch):
    monkeypatch.setattr(machine, "_HUB_TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        before = time.monotonic()
        assert "no connection to" in str(machine.unreachable())
        assert time.monotonic() - before < 5


def test_offline_mode_contacts_no_server(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("requests.head", lambda *_, **__: pytest.fail("the server was contacted"))
    assert machine.unreachable() == "HF_HUB_OFFLINE=1 is set"


def test_a_model_that_was_not_downloaded_has_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert machine.cached_folder("someone/model") is None
    folder = tmp_path / "models--someone--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert machine.cached_folder("someone/model") == folder
