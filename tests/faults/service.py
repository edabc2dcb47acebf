"""A scoring service whose answers a fault replaces."""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Answers", int], bool]  # answers a request for n scores; returns False: answer as usual


def score(response: str) -> float:
    """Return a number that depends on the text only."""
    return zlib.crc32(response.encode()) % 1000 / 500 - 1


class Answers(BaseHTTPRequestHandler):
    """The handler of one request."""

    server: Server

    def do_POST(self) -> None:
        """Answer a request for scores."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.strikes(self, len(asked["responses"])):
            return
        self.reply(200, {"scores": [score(response) for response in asked["responses"]]})

    def reply(self, status: int, body: Any, **headers: str) -> None:
        """Send a whole answer; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.begin(status, len(data), **headers)
        self.wfile.write(data)

    def begin(self, status: int, length: int | None, **headers: str) -> None:
        """Send the head of an answer."""
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def reset(self) -> None:
        """Close the connection with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """The server; its next answers are those of a fault."""

    daemon_threads = True
    fault: Fault | None = None
    left = 0  # number of requests that the fault answers
    struck = 0  # number of requests that the fault has answered
    closing = False

    def strikes(self, request: Answers, count: int) -> bool:
        """Let the fault answer a request, if there is a fault; return whether it did."""
        with self.lock:
            if self.fault is None or self.left <= 0:
                return False
            self.left -= 1
            self.struck += 1
            fault = self.fault
        return fault(request, count)

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore a client that closed the connection."""

    def pause(self, seconds: float) -> None:
        """Wait; return early when the service closes."""
        end = time.monotonic() + seconds
        while not self.closing and time.monotonic() < end:
            time.sleep(0.05)


class Service:
    """A service on a free port of this machine while the context is open."""

    def __init__(self) -> None:
        self.port = 0
        self.server: Server | None = None

    def __enter__(self) -> Service:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address of the service."""
        return f"http://127.0.0.1:{self.port}/score"

    def open(self) -> None:
        """Start to accept connections, on the port of before."""
        self.server = Server(("127.0.0.1", self.port), Answers, bind_and_activate=False)
        self.server.lock = threading.Lock()
        self.server.allow_reuse_address = True
        self.server.server_bind()
        self.server.server_activate()
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        if self.server is not None:
            self.server.closing = True
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def fail(self, fault: Fault, times: int = 10**9) -> None:
        """Let `fault` answer the next requests."""
        assert self.server is not None
        with self.server.lock:
            self.server.fault, self.server.left = fault, times

    def recover(self) -> None:
        """Answer all requests as usual, from now on."""
        if self.server is None:
            self.open()
        self.server.fault = None
