"""A local HTTP server whose addresses answer with valid and invalid scores."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answers(BaseHTTPRequestHandler):
    """Answers of the server; the path of the address selects the answer."""

    def do_POST(self) -> None:
        """Answer a request for scores."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = len(asked["responses"])
        scores: dict[str, Any] = {
            "/fine": {"scores": [0.1 * i for i in range(count)]},
            "/short": {"scores": [0.0] * (count - 1)},
            "/nan": {"scores": [float("nan")] * count},
            "/texts": {"scores": ["good"] * count},
            "/list": [0.0] * count,
            "/other_key": {"rewards": [0.0] * count},
        }
        path = self.path.partition("?")[0]
        if path == "/slow":
            time.sleep(30)
        if path == "/html":
            self.reply(200, b"<html>hello</html>", "text/html")
        elif path in scores:
            self.reply(200, json.dumps(scores[path]).encode(), "application/json")
        elif path == "/forbidden":
            self.reply(401, b'{"detail": "no token"}', "application/json")
        else:
            self.reply(500 if path == "/broken" else 404, b"no such address", "text/plain")

    def reply(self, status: int, body: bytes, kind: str) -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


class Service:
    """The server, on a free port of this machine, while the context is open."""

    def __enter__(self) -> Service:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
