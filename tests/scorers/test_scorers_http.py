"""Tests of the scorer that sends responses to an HTTP service, with a server on the same machine."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.scorers import HttpScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.scorers.http import HttpScorer
from rlhf.text.encoding import encode_completions, encode_prompts
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
    first = {name: texts[:3] for name, texts in service.requests[0].items()}
    expected = {"prompts": ["w0", "w0", "w1"], "responses": ["w0", "w1", "w2"]}
    assert first == {**expected, "references": ["w0 w0", "w0 w0", "w1 w0"]}


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
    ("answer", "said"),
    [
        ({"scores": [1.0] * 3}, "3 scores for 24 responses"),
        ({"scores": [1.0] * 23 + [float("nan")]}, "nan as score 23 of 24"),
        ({"scores": [1.0] * 23 + [None]}, "None as score 23 of 24"),
        ({"scores": ["1"] * 24}, "'1' as score 0 of 24"),
        ({"rewards": [1.0] * 24}, "rewards"),
        ([1.0] * 24, "[1.0"),
        (b"<html>", "<html>"),
        (b"[" * 10**6, "[[["),
        (b'{"scores": [1' + b"0" * 5000 + b"]}", '{"scores": ...'),
        (b"\xff\xfe", "\ufffd"),
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
    monkeypatch.delenv("SCORE_TOKEN")
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


# -- services that misbehave -------------------------------------------------------------------------


@pytest.fixture
def rough() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """`rough(answer)` starts a server whose connections are answered by `answer`; returns its address."""
    listeners: list[socket.socket] = []
    connections: list[socket.socket] = []

    def serve(answer: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def handle(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                request = connection.makefile("rb")
                if request.readline():  # empty: only a check whether the service accepts connections
                    head = b"".join(iter(request.readline, b"\r\n")).lower()
                    size = int(head.partition(b"content-length:")[2].split()[0])
                    request.read(size)  # a connection that is closed before resets
                    answer(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/score"

    yield serve
    for each in (*listeners, *connections):
        each.close()


OK = b"HTTP/1.1 200 OK\r\n"


def drips(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    """Return an answer that sends `head` and then `piece` again and again."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(0.02)

    return answer


def hangs(connection: socket.socket) -> None:
    threading.Event().wait(5)


def scorer_at(url: str, **settings: Any) -> HttpScorer:
    return HttpScorer(HttpScorerConfig(url=url, **settings), scorer_context(TOKENIZER))


@pytest.mark.parametrize(
    "answer",
    [
        drips(OK + b"Content-Length: 1000\r\n\r\n", b" "),
        drips(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drips(OK, b"X: y\r\n"[:1]),
        hangs,
    ],
    ids=["slow body", "slow chunks", "slow headers", "no answer"],
)
def test_timeout_s_limits_the_whole_try(rough, answer):
    start = time.monotonic()
    with pytest.raises(RunError, match=r"did not answer in 2 tries of 0.3 s \(timed out\)"):
        scorer_at(rough(answer), timeout_s=0.3, retries=1)(rollouts())
    assert 0.6 <= time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (OK + b"Content-Length: 3000000000\r\n\r\n", b" " * 2**20),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b" " * 2**20 + b"\r\n"),
        (OK + b"Connection: close\r\n\r\n", b" " * 2**20),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 3000000000\r\n\r\n", b"a" * 2**20),
    ],
    ids=["length", "chunks", "no length", "error"],
)
def test_an_answer_is_read_up_to_a_limit(rough, head, piece):
    sent = 0

    def answer(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(head)
        while sent < 3e9:
            connection.sendall(piece)
            sent += len(piece)

    tracemalloc.start()
    try:
        with pytest.raises(RunError, match="answered with (more than 1,073,152 bytes|status 404)"):
            scorer_at(rough(answer), concurrency=1)(rollouts())
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    time.sleep(0.1)
    assert sent < 50e6, "the connection must be closed"


def test_a_compressed_answer_is_read_up_to_a_limit(rough):
    bomb = gzip.compress(bytes(300_000_000), compresslevel=1)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with pytest.raises(RunError, match="answered with more than 1,073,152 bytes"):
        scorer_at(rough(lambda connection: connection.sendall(head + bomb)))(rollouts())


def test_a_cut_answer_is_repeated(rough):
    answers = iter([b"Content-Length: 1000\r\n\r\n{", b"Content-Length: 3\r\n\r\n{}}"])
    with pytest.raises(RunError, match="answered with status 200 and '{}}'"):
        scorer_at(rough(lambda connection: connection.sendall(OK + next(answers))))(rollouts())


def answers_later(header: str) -> Callable[[socket.socket], None]:
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {header}\r\nContent-Length: 0\r\n\r\n"
    return lambda connection: connection.sendall(head.encode())


@pytest.mark.parametrize("header", ["", "soon", "-1"])
def test_an_invalid_retry_after_is_ignored(rough, header):
    with pytest.raises(RunError, match="2 tries were made"):
        scorer_at(rough(answers_later(header)), retries=1, concurrency=1)(rollouts())


@pytest.mark.parametrize("date", [False, True])
def test_a_retry_after_above_timeout_s_stops_the_run_at_once(rough, date):
    header = formatdate(time.time() + 100_000, usegmt=True) if date else "100000"
    with pytest.raises(RunError) as stopped:
        scorer_at(rough(answers_later(header)))(rollouts())
    text = str(stopped.value)
    assert "status 429" in text and "asked to wait for" in text and "(Retry-After)" in text
    assert re.search(r"set scorer.timeout_s=(100000|999\d\d)$", text)


def test_a_short_retry_after_is_honoured(rough):
    start = time.monotonic()
    with pytest.raises(RunError, match="2 tries were made"):
        scorer_at(rough(answers_later("1")), retries=1, concurrency=1)(rollouts())
    assert 1 <= time.monotonic() - start < 2


# -- secrets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://h/x?token=hunter2",
        "http://h/x?a=1&api_key=hunter2",
        "http://h/x?sig=hunter2",
        "http://h/x?q=hunter2hunter2hunter2",
        "http://h/x#access_token=hunter2",
        "http://hunter2@h/x",
        "http://me:hunter2@h/x",
    ],
)
def test_a_secret_in_the_address_is_refused_and_not_shown(url):
    assert not list(HttpScorerConfig(url="http://h/x?version=2&model=llama-3-8b").problems("scorer"))
    (problem,) = HttpScorerConfig(url=url).problems("gold")
    assert problem.startswith("gold.url must not contain a ") and "hunter2" not in problem
    assert "set gold.token_variable=<environment variable" in problem


@pytest.mark.parametrize(
    ("variable", "token", "said"),
    [
        ("hunter2", "", "may be the token itself; run: export SCORE_TOKEN=<token>"),
        ("SCORE_TOKEN", "", "got SCORE_TOKEN, which is not set"),
        ("SCORE_TOKEN", "hunter2\n", "contains others, such as a line break"),
    ],
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(monkeypatch, variable, token, said):
    monkeypatch.setenv("SCORE_TOKEN", token)
    config = HttpScorerConfig(url="http://h/x", token_variable=variable)
    (problem,) = config.problems("scorer")
    assert said in problem and "hunter2" not in problem


def test_the_example_service_of_the_docs_returns_scores():
    docs = (Path(__file__).parents[2] / "docs" / "data-model-reward.md").read_text()
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
