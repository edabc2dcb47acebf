"""Tests of a teacher on a server, with a server on the same machine that has a tiny model of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from rlhf.config.models import Dtype
from rlhf.config.scorers import ServedTeacherConfig
from rlhf.core.batch import Budget, Rollouts
from rlhf.core.errors import RunError
from rlhf.models.forward import infer
from rlhf.models.modules import Policy
from rlhf.processes.ranks import ALONE
from rlhf.scorers.teacher import ServedTeacher
from tests.tiny_models import tiny_lm, tiny_rollouts, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LM, MODEL = tiny_lm(), "a/teacher"
LIMIT_S = 5.0  # of a test with a server that hangs


@torch.no_grad()
def completion(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of vLLM's route /v1/completions to a question for the log-probs of a prompt."""
    ids = question["prompt"]
    logprobs = LM(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries: list[Any] = [None]
    for place, token in enumerate(ids[1:]):
        row = logprobs[place]
        best = row.topk(question["prompt_logprobs"]).indices.tolist()
        entries.append(
            {
                str(each): {
                    "logprob": row[each].item(),
                    "rank": int((row >= row[each]).sum()),
                    "decoded_token": TOKENIZER.decode([each]),
                }
                for each in dict.fromkeys([token, *best])
            }
        )
    return {"model": question["model"], "choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}


Answer = Callable[[dict[str, Any], int], tuple[int, Any]]


@dataclass
class Stub:
    """A server; `answer` maps a question and its number to a status and a body, and may wait or raise."""

    answer: Answer = lambda question, which: (200, completion(question))
    port: int = 0
    questions: list[dict[str, Any]] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.questions.append(question)
                if self.path != "/v1/completions" or question["model"] != MODEL:
                    status, found = 404, {"error": {"message": f"model {question['model']} does not exist"}}
                else:
                    status, found = stub.answer(question, len(stub.questions) - 1)
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
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    made.start()
    yield made
    made.stop()


def teacher(stub: Stub, model: str = MODEL, **settings: Any) -> ServedTeacher:
    config = ServedTeacherConfig(url=f"http://127.0.0.1:{stub.port}", **settings)
    return ServedTeacher(config, model, TOKENIZER)


def in_this_process(rollouts: Rollouts) -> torch.Tensor:
    reference = Policy(tiny_lm(), 1.0, shared_prefix=True)
    return infer(reference, rollouts, "logprobs", Budget(8), ALONE, Dtype.float32)


def episodes() -> Rollouts:
    """Return rollouts whose third and fourth tokens are messages of an environment."""
    rollouts = tiny_rollouts(5, 2)
    message = rollouts.response_mask.clone()
    message[..., :2], message[..., 4:] = False, False
    return replace(rollouts, response_mask=rollouts.response_mask & ~message, environment_mask=message)


@pytest.mark.parametrize("make", [lambda: tiny_rollouts(5, 3), episodes])
def test_log_probs_are_those_of_the_model_in_this_process(make, stub):
    rollouts = make()
    found = infer(teacher(stub), rollouts, "logprobs", Budget(4), ALONE, Dtype.float32)
    torch.testing.assert_close(found, in_this_process(rollouts), atol=1e-5, rtol=0)
    assert not found[~rollouts.response_mask].any()
    assert {each["max_tokens"] for each in stub.questions} == {1}


def changed(change: Callable[[list[Any]], Any]) -> Answer:
    """Return an answer whose list of entries was changed."""

    def answer(question: dict[str, Any], which: int) -> tuple[int, Any]:
        found = completion(question)
        change(found["choices"][0]["prompt_logprobs"])
        return 200, found

    return answer


def set_last(**values: Any) -> Answer:
    return changed(lambda entries: next(iter(entries[-1].values())).update(values))


WRONG: dict[str, tuple[Answer, str]] = {
    "no entry of the token": (changed(lambda entries: entries[-1].clear()), "for the token"),
    "no entries": (changed(lambda entries: entries.pop()), "log-probs of"),
    "none at all": (lambda question, which: (200, {"choices": [{"text": ""}]}), "status 200"),
    "no JSON object": (lambda question, which: (200, [1]), "status 200"),
    "another vocabulary": (set_last(decoded_token="the"), "for the token"),
    "no tokenizer": (set_last(decoded_token=None), "for the token"),
    "nan": (set_last(logprob=float("nan")), "for the token"),
    "what vLLM writes for nan": (set_last(logprob=-9999.0), "for the token"),
    "a text": (set_last(logprob="-1"), "for the token"),
    "an error of the server": (lambda question, which: (500, {"error": "engine"}), "status 500"),
    "a refused prompt": (
        lambda question, which: (400, {"error": "maximum context length"}),
        "context length",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_answer_that_cannot_be_used_is_an_error_with_the_key(fault, stub):
    stub.answer, said = WRONG[fault]
    with pytest.raises(RunError, match=said) as error:
        teacher(stub, retries=1)(tiny_rollouts(2, 1))
    assert str(error.value).startswith("algo.teacher.url=http://127.0.0.1")


def test_another_model_on_the_server_is_an_error_with_its_name(stub):
    with pytest.raises(RunError, match="status 404.*other/model does not exist"):
        teacher(stub, "other/model")(tiny_rollouts(2, 1))


def test_a_server_that_hangs_is_an_error_within_its_limit(stub):
    stub.answer = lambda question, which: time.sleep(60)  # type: ignore[func-returns-value]
    begin = time.monotonic()
    with pytest.raises(RunError, match="did not answer in 2 tries of 0.3 s"):
        teacher(stub, timeout_s=0.3, retries=1)(tiny_rollouts(2, 1))
    assert time.monotonic() - begin < LIMIT_S


def test_a_server_that_starts_again_gets_the_request_again(stub):
    asked, rollouts = teacher(stub, retries=5, concurrency=1), tiny_rollouts(3, 1)
    asked(rollouts)
    stub.stop()
    again = threading.Timer(0.5, stub.start)
    again.start()
    found = asked(rollouts).logprobs
    again.join()
    torch.testing.assert_close(found, in_this_process(rollouts), atol=1e-5, rtol=0)


def test_the_key_of_the_server_is_sent_and_is_in_no_message(stub, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "hidden")
    stub.answer = lambda question, which: (401, {"error": "Unauthorized"})
    with pytest.raises(RunError, match="token_variable") as error:
        teacher(stub, token_variable="TEACHER_KEY")(tiny_rollouts(1, 1))
    assert "hidden" not in str(error.value)
