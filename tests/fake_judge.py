"""A judge with a known bias in place of a language model, at the routes of an OpenAI-compatible server."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Value = Callable[[str, str], float]  # prompt and response -> how good the response is


def words(prompt: str, response: str) -> float:
    """Return the number of words: this judge prefers the longer response."""
    return float(len(response.split()))


@dataclass
class FakeJudge:
    """A judge that prefers the response with the higher value, apart from these faults.

    Attributes:
        value: what a response is worth.
        position: share of questions that are answered with the response shown first.
        noise: share of questions with a random verdict.
        drift: whether a repeated question gets a new random verdict; without it, the text decides it.
        garbage: share of questions that are answered with a text that is no verdict.
        tokens: tokens read and written that each answer reports.
        model: the name of the model.
        key: the token that requests must have; None: none.
        respond: replaces the answer: request -> status and body; it may wait.
    """

    value: Value = words
    position: float = 0.0
    noise: float = 0.0
    drift: bool = False
    garbage: float = 0.0
    tokens: tuple[int, int] = (100, 5)
    model: str = "judge"
    key: str | None = None
    respond: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda request: None
    url: str = ""
    asked: list[str] = field(default_factory=list)  # the texts of all questions
    requests: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the answer to a request."""
        text = request["messages"][0]["content"]
        fence = re.search(r"#[0-9a-f]{12}", text)[0]  # type: ignore[index]
        blocks = [each.partition("\n")[2].strip("\n") for each in text.split(fence)[2::2]]
        prompt, shown = blocks[0], blocks[1:]
        draw = random.Random(None if self.drift else text)
        values = [self.value(prompt, each) for each in shown]
        if draw.random() < self.noise:
            values = [draw.random() for _ in shown]
        if draw.random() < self.position:
            values = [-float(i) for i in range(len(shown))]
        letters = "ABCDEFGH"[: len(shown)]
        order = [letters[i] for i in sorted(range(len(shown)), key=lambda i: -values[i])]
        best = "tie" if len({*values}) == 1 else order[0]
        schema = request.get("response_format", {}).get("json_schema", {}).get("schema", {})
        forms = {**schema.get("properties", {}), **request.get("structured_outputs", {})}
        criteria = re.findall(r"(?m)^(\d+)\. (.*)$", text)
        choices = forms.get("choice", [])
        if criteria:
            found: dict[str, Any] = {i: "yes" if each in shown[0] else "no" for i, each in criteria}
        elif (
            "order" in forms
            or len(shown) > 2
            or any(">" in each for each in choices)
            or "letters of all" in text
        ):
            found = {"order": order}
        elif "grade" in forms or "10" in choices or len(shown) == 1:
            found = {"grade": max(1, min(10, round(values[0])))}
        else:
            found = {"better": best}
        content = json.dumps(found)
        if not schema:
            plain = {"order": " > ".join(order), "better": best}
            content = plain.get(next(iter(found)), str(next(iter(found.values()))))
            content = "\n".join(f"{i}: {each}" for i, each in found.items()) if criteria else content
        if draw.random() < self.garbage:
            content = "I would rather not say."
        choice: dict[str, Any] = {"message": {"content": content}, "finish_reason": "stop"}
        if request.get("logprobs"):
            p = {"A": 0.8, "B": 0.1, "tie": 0.1} if best == "A" else {"A": 0.1, "B": 0.8, "tie": 0.1}
            top = [{"token": f" {each}", "logprob": math.log(x)} for each, x in p.items()]
            choice["logprobs"] = {"content": [{"token": best, "top_logprobs": top}]}
        read, written = self.tokens
        return {"choices": [choice], "usage": {"prompt_tokens": read, "completion_tokens": written}}


@contextmanager
def served(judge: FakeJudge) -> Iterator[FakeJudge]:
    """Serve a judge at a free port of this machine during the block; `judge.url` is its address."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": judge.model}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                judge.asked.append(request["messages"][0]["content"])
                judge.requests.append(request)
            self.send(*(judge.respond(request) or (200, judge.answer(request))))

        def send(self, status: int, found: Any) -> None:
            if judge.key is not None and self.headers["Authorization"] != f"Bearer {judge.key}":
                status, found = 401, {"error": "wrong key"}
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            with suppress(OSError):  # the run has ended
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size, daemon_threads = 256, True

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
