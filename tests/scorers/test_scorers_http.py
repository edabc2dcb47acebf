"""Tests of the scorer that sends responses to an HTTP service, with a server on the same machine."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from urllib3.exceptions import MaxRetryError, ProtocolError, SSLError

from rlhf.config.scorer import HttpScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.core.encoding import encode_completions, encode_prompts
from rlhf.core.errors import RunError, UserError
from rlhf.scorers.http import HttpScorer, cause_of
from tests.tiny_models import scorer_context, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COUNT = 12  # prompts, with two responses each


@dataclass
class Service:
    """The state of a test server.

    `answer` maps the body of a request and its index to a status and a body. `most_at_once` is the largest
    number of requests that were answered in parallel.
    """

    answer: Callable[[dict, int], tuple[int, object]]
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def lengths(request: dict, which: int) -> tuple[int, object]:
    """Answer with the number of each response as its score: i for w<i>."""
    return 200, {"scores": [int(text[1:]) for text in request["responses"]]}


@pytest.fixture
def service() -> Iterator[Service]:
    """Run a server on an ephemeral port that scores responses by their number."""
    state = Service(lengths)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                which = len(state.requests)
                state.requests.append(body)
                state.headers.append(dict(self.headers))
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            status, answer = state.answer(body, which)
            with state.lock:
                state.at_once -= 1
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/score"
    yield state
    server.shutdown()
    server.server_close()


def rollouts() -> Rollouts:
    texts = [[f"w{2 * i}", f"w{2 * i + 1}"] for i in range(COUNT)]
    names = [f"w{i}" for i in range(COUNT)]
    prompts = encode_prompts(torch.arange(COUNT), names, [name + " w0" for name in names], TOKENIZER)
    return encode_completions(prompts, texts, TOKENIZER, response_length=None)


EXPECTED = [[2 * i, 2 * i + 1] for i in range(COUNT)]


def scorer_of(service: Service, **settings) -> HttpScorer:
    return HttpScorer(HttpScorerConfig(url=service.url, **settings), scorer_context(TOKENIZER))


def test_texts_are_posted_in_batches_with_prompts_and_references(service):
    assert scorer_of(service, batch_size=5, concurrency=1)(rollouts()).scores.tolist() == EXPECTED
    assert [len(request["responses"]) for request in service.requests] == [5, 5, 5, 5, 4]
    assert service.requests[0] == {
        "prompts": ["w0", "w0", "w1", "w1", "w2"],
        "responses": ["w0", "w1", "w2", "w3", "w4"],
        "references": ["w0 w0", "w0 w0", "w1 w0", "w1 w0", "w2 w0"],
    }


def test_scores_keep_their_order_if_answers_arrive_out_of_order(service):
    def late_first(request, which):
        time.sleep(0.3 if request["responses"][0] in ("w0", "w8") else 0)
        return lengths(request, which)

    service.answer = late_first
    assert scorer_of(service, batch_size=4, concurrency=3)(rollouts()).scores.tolist() == EXPECTED
    assert 2 <= service.most_at_once <= 3


@pytest.mark.parametrize("status", [503, 500, 429])
def test_a_request_to_a_busy_service_is_retried(service, status):
    service.answer = lambda request, which: (status, {}) if which < 2 else lengths(request, which)
    assert scorer_of(service, retries=2)(rollouts()).scores.tolist() == EXPECTED
    assert len(service.requests) == 3 and service.requests[0] == service.requests[2]


def test_a_service_that_stays_busy_stops_the_run(service):
    service.answer = lambda request, which: (503, {"detail": "too busy"})
    with pytest.raises(RunError) as stopped:
        scorer_of(service, retries=1)(rollouts())
    text = str(stopped.value)
    assert f"scorer.url={service.url} answered with status 503" in text and "too busy" in text
    assert "2 tries were made" in text and "scorer.retries" in text and len(service.requests) == 2


def test_a_timeout_is_retried_then_stops_the_run(service):
    def late(request, which):
        time.sleep(1.0 if which == 0 else 0)
        return lengths(request, which)

    service.answer = late
    assert scorer_of(service, timeout_s=0.5, retries=1)(rollouts()).scores.tolist() == EXPECTED
    service.requests.clear()
    with pytest.raises(RunError) as stopped:
        scorer_of(service, timeout_s=0.5, retries=0)(rollouts())
    text = str(stopped.value)
    assert f"scorer.url={service.url} did not answer in 1 try of 0.5 s (timed out)" in text
    assert "raise scorer.timeout_s" in text


def test_a_service_that_refuses_the_first_connection_stops_the_run_at_once(monkeypatch):
    config = HttpScorerConfig(url="http://127.0.0.1:1/score", retries=5)
    scorer = HttpScorer(config, scorer_context(TOKENIZER, "gold"))
    monkeypatch.setattr(scorer.session, "post", lambda *_, **__: pytest.fail("a request was sent"))
    with pytest.raises(RunError) as stopped:
        scorer.score(rollouts())
    assert str(stopped.value) == (
        "gold.url=http://127.0.0.1:1/score does not accept connections (Connection refused); start the "
        "service, or correct gold.url"
    )


def test_a_service_that_ends_during_the_run_is_retried_and_reported_without_text_of_the_libraries(service):
    scorer = scorer_of(service, retries=1)
    scorer(rollouts())
    scorer.url = "http://127.0.0.1:1/score"
    with pytest.raises(
        RunError, match=r"did not answer in 2 tries of 60 s \(Connection refused\); check"
    ) as stopped:
        scorer(rollouts())
    assert "HTTPConnectionPool" not in str(stopped.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (requests.ReadTimeout("Read timed out. (read timeout=1)"), "timed out"),
        (requests.ConnectionError(ProtocolError("x", ConnectionResetError(104, "Reset"))), "Reset"),
        (requests.exceptions.SSLError(MaxRetryError(None, "/", SSLError("handshake"))), "SSLError"),
        (requests.RequestException(), "RequestException"),
    ],
)
def test_the_cause_of_a_failed_request_is_one_phrase(error, said):
    assert cause_of(error) == said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"scores": [1.0] * 3}, "3 scores for 24 responses"),
        ({"scores": [1.0] * 23 + [float("nan")]}, "nan as score 23 of 24"),
        ({"scores": [1.0] * 23 + [None]}, "None as score 23 of 24"),
        ({"scores": ["1"] * 24}, "'1' as score 0 of 24"),
        ({"rewards": [1.0] * 24}, "rewards"),
        ([1.0] * 24, "[1.0"),
        (b"<html>", "<html>"),
    ],
)
def test_an_answer_without_valid_scores_stops_the_run(service, answer, said):
    service.answer = lambda request, which: (200, answer)
    with pytest.raises(RunError) as stopped:
        scorer_of(service)(rollouts())
    text = str(stopped.value)
    assert f"scorer.url={service.url} answered with status 200 and" in text and said in text
    assert "correct the service" in text and len(service.requests) == 1


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (400, "correct scorer.url, or see the log of the service"),
        (401, "scorer.token_variable"),
        (404, "scorer.url"),
        (413, "lower scorer.batch_size"),
        (307, "correct scorer.url"),
    ],
)
def test_a_rejected_request_is_not_retried_and_the_error_names_the_remedy(service, status, remedy):
    service.answer = lambda request, which: (status, {"detail": "no"})
    with pytest.raises(RunError) as stopped:
        scorer_of(service)(rollouts())
    assert f"answered with status {status}" in str(stopped.value) and remedy in str(stopped.value)
    assert len(service.requests) == 1


def test_the_token_is_read_from_its_variable_and_never_from_netrc(service, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("SCORE_TOKEN", "hunter2")
    scorer_of(service, token_variable="SCORE_TOKEN")(rollouts())
    scorer_of(service)(rollouts())
    assert [headers.get("Authorization") for headers in service.headers] == ["Bearer hunter2", None]


def test_an_unset_token_variable_is_a_user_error(service, monkeypatch):
    monkeypatch.delenv("SCORE_TOKEN", raising=False)
    with pytest.raises(UserError, match="scorer.token_variable must name an environment variable"):
        scorer_of(service, token_variable="SCORE_TOKEN")


def test_this_machine_is_reached_without_a_proxy(service, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert scorer_of(service, retries=0)(rollouts()).scores.tolist() == EXPECTED
    service.url = service.url.replace("127.0.0.1", "localhost")
    assert scorer_of(service, retries=0)(rollouts()).scores.tolist() == EXPECTED
    away = HttpScorer(HttpScorerConfig(url="http://scores.example/x"), scorer_context(TOKENIZER))
    assert away.session.trust_env, "other machines may be reachable only through the proxy of a cluster"


def test_the_example_service_of_the_docs_returns_scores():
    docs = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    found = re.search(r"```python\n(import json.*?)```", docs, re.S)
    assert found is not None
    names: dict[str, Any] = {"__name__": "docs"}
    exec(found[1], names)
    names["Scores"].log_message = lambda *_: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), names["Scores"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/score"
    scores = HttpScorer(HttpScorerConfig(url=url), scorer_context(TOKENIZER))(rollouts()).scores
    server.shutdown()
    server.server_close()
    assert scores.tolist() == [[1, 1]] * COUNT
