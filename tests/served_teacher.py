"""A server in place of vLLM's, on the same machine, that reads prompts with a model of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "a/teacher"


@dataclass
class Reader:
    """What answers: a model under a name, with its tokenizer."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = MODEL
    most: int = 1000  # candidates that it sends, as --max-logprobs says

    @torch.no_grad()
    def completion(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of vLLM's route /v1/completions to a question for the log-probs of a prompt."""
        ids = question["prompt"]
        logprobs = self.lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            row = logprobs[place]
            best = row.topk(question["prompt_logprobs"]).indices.tolist()
            ranks = {token: int((row >= row[token]).sum()), **{each: i + 1 for i, each in enumerate(best)}}
            texts = {each: self.tokenizer.decode([each]) for each in ranks}
            entries.append(
                {
                    str(each): {"logprob": row[each].item(), "rank": rank, "decoded_token": texts[each]}
                    for each, rank in ranks.items()
                }
            )
        return {"model": question["model"], "choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}

    def __call__(self, question: dict[str, Any], which: int) -> tuple[int, Any]:
        """Return status and body of the answer; `which` is the number of the question."""
        if question["model"] != self.name:
            return 404, {"error": {"message": f"model {question['model']} does not exist"}}
        if (wanted := question["prompt_logprobs"]) > self.most:
            message = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.most}"
            return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
        return 200, self.completion(question)


Answer = Callable[[dict[str, Any], int], tuple[int, Any]]


@dataclass
class Stub:
    """A server; `answer` maps a question and its number to a status and a body, and may wait or raise."""

    answer: Answer
    port: int = 0
    questions: list[dict[str, Any]] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Answer requests, at the port of the start before if there was one."""
        stub, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(200, {})

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.questions.append(question)
                    which = len(stub.questions) - 1
                self.send(*((404, {}) if self.path != "/v1/completions" else stub.answer(question, which)))

            def send(self, status: int, found: Any) -> None:
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads, self.port = True, self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
