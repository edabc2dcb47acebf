"""The server of a judge: one for each model and its arguments, started again after it died."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import requests

from rlhf.core.errors import UserError
from rlhf.core.machine import model_names
from rlhf.processes import servers

# A server that lists a model, unless its folder has a file `broken`
STAND_IN = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.path.exists("broken"):
    sys.exit("no such model")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "tiny"}]}' if known else b"{}")

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.process
def test_a_judge_has_one_server_that_asks_for_a_key_and_is_started_again_if_it_died(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(servers._ASKED, "{}")
    monkeypatch.setattr(servers, "_children", {})
    monkeypatch.setattr(servers, "_POLL_S", 0.02)
    monkeypatch.setattr(servers, "program", lambda arguments: [sys.executable, "-c", STAND_IN])

    def ask(**arguments: int) -> tuple[str, str]:
        return servers.served("tiny", arguments, None, tmp_path / "logs" / "server.log")

    try:
        url, key = ask()
        assert ask() == (url, key) and len(servers._children) == 1
        assert model_names(f"{url}/models", key) == ["tiny"]
        assert requests.get(f"{url}/models", timeout=5).status_code == 401
        assert ask(max_model_len=64)[0] != url, "another server for other arguments"
        (child, _) = servers._children.values()
        os.killpg(child.process.pid, signal.SIGKILL)
        while not child.ended():
            time.sleep(0.02)
        (tmp_path / "broken").touch()
        for _ in range(2):  # the address of a server that does not run is never returned
            with pytest.raises(UserError, match="must serve the judge tiny.*no such model"):
                ask()
        (tmp_path / "broken").unlink()
        assert ask() == (url, key) and model_names(f"{url}/models", key) == ["tiny"]
    finally:
        for child in servers._children.values():
            child.stop()
