"""Tests of runs with a scoring service that hangs, sends endless answers or asks to wait.

A signal ends the wait within a second, and the same command then resumes with identical results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from rlhf.core.errors import Interrupted
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import run_name
from tests.end_to_end.conftest import assert_same_end, nightly, rows, wait_for

RUN = ["schedule.total_episodes=64", "schedule.save_every=2", "schedule.eval_every=2", "algo.ties=keep"]
STOP_S = 15.0  # far below the waits for the service: checkpoint and exit take 1 to 4 s on a busy machine


class Service:
    """A service that scores a response by its number of words.

    From request number `since` on, `fault(handler)` is called in place of the answer.
    """

    def __init__(self):
        service = self
        self.begin()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests += bool(request["responses"])  # the check before a run asks for no score
                if request["responses"] and service.fault is not None and service.requests >= service.since:
                    service.entered.set()
                    service.fault(self)
                    return
                body = json.dumps({"scores": [len(text.split()) for text in request["responses"]]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_): ...

            def handle(self):
                with suppress(OSError):
                    super().handle()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"

    def begin(self):
        """Answer all requests, and count from 0."""
        self.fault = None
        self.since = 0
        self.requests = 0
        self.entered = threading.Event()
        self.ended = threading.Event()

    def hang(self, handler):
        self.ended.wait(60)

    def drip(self, handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not self.ended.wait(0.05):
            handler.wfile.write(b" ")

    def ask_to_wait(self, handler):
        handler.send_response(429)
        handler.send_header("Retry-After", "50")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def flood(self, handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "3000000000")
        handler.end_headers()
        for _ in range(3000):
            handler.wfile.write(b" " * 10**6)


@pytest.fixture(scope="module")
def server():
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def service(server):
    server.begin()
    yield server
    server.ended.set()


@pytest.fixture(scope="module")
def whole(server, finished):
    """`whole(*words)` returns a finished run without a fault, and the number of its requests."""
    asked = {}

    def get(*words):
        before, folder = server.requests, finished(*words)
        return folder, asked.setdefault(words, server.requests - before)

    return get


def start(words):
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# At lag 0 the trainer scores, and at lag 1 the annotator process.
@pytest.mark.parametrize(
    ("fault", "max_lag"),
    [
        ("hang", 0),
        ("drip", 1),
        nightly("ask_to_wait", 0),
        nightly("hang", 1),
        nightly("drip", 0),
        nightly("ask_to_wait", 1),
    ],
)
def test_sigterm_while_scores_are_awaited_writes_a_checkpoint_and_the_run_resumes(
    tiny, command, service, whole, tmp_path, fault, max_lag
):
    words = [*RUN, "scorer=http", f"scorer.url={service.url}", f"schedule.max_lag={max_lag}"]
    folder, (uninterrupted, asked) = RunFolder(tmp_path / run_name(tiny(*words))), whole(*words)
    service.fault, service.requests, service.since = getattr(service, fault), 0, asked // 2
    process = start([*command, *words, "schedule.save_every=0"])
    wait_for(service.entered.is_set, process)
    time.sleep(0.5)
    process.terminate()
    begun = time.monotonic()
    told, _ = process.communicate(timeout=60)
    assert process.returncode == os.EX_TEMPFAIL, told
    assert time.monotonic() - begun < STOP_S
    last = folder.last_checkpoint()
    assert told.splitlines()[-1].endswith(f"checkpoint: {last}; the same command resumes from it")
    assert "Traceback" not in told
    service.fault = None
    run(tiny(*words), folder)
    assert_same_end(folder, uninterrupted)


@pytest.mark.parametrize("update", [nightly(0), nightly(2), 4])
def test_a_signal_while_an_evaluation_waits_for_a_service_leaves_the_evaluation_to_the_next_session(
    tiny, service, whole, tmp_path, update
):
    words = [*RUN, "scorer@gold=http", f"gold.url={service.url}", "schedule.save_every=0"]
    folder, (uninterrupted, _) = RunFolder(tmp_path / "run"), whole(*words)
    evaluations = [row["update"] for row in rows(uninterrupted) if "eval/gold_score" in row]
    assert evaluations == [0, 2, 4]

    def interrupt(handler):
        os.kill(os.getpid(), signal.SIGUSR1)
        service.hang(handler)

    # The first evaluation asks for the scores of the references too.
    service.fault, service.requests, service.since = interrupt, 0, {0: 1, 2: 3, 4: 4}[update]
    with pytest.raises(Interrupted, match=f"by SIGUSR1 after update {update} of 4"):
        run(tiny(*words), folder)
    assert (folder.last_checkpoint() is None) == (update == 0)
    service.fault = None
    run(tiny(*words), folder)
    assert_same_end(folder, uninterrupted)


def test_a_huge_answer_stops_the_run_with_little_memory(tiny, command, service):
    words = [*command, *RUN, "scorer=http", f"scorer.url={service.url}"]
    service.fault, service.since = service.flood, 3
    process, most, before = start(words), 0, None
    while process.poll() is None:
        try:
            size = psutil.Process(process.pid).memory_info().rss
        except psutil.Error:
            break
        if service.entered.is_set():
            before = before or size
            most = max(most, size)
        time.sleep(0.005)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "answered with more than" in told and "Traceback" not in told
    assert most - before < 50e6


def test_two_sigterms_end_a_run_whose_annotator_waits_for_a_service(command, service):
    words = [*command, *RUN, "scorer=http", f"scorer.url={service.url}", "schedule.max_lag=1"]
    service.fault, service.since = service.hang, 1
    process = start(words)
    wait_for(service.entered.is_set, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    time.sleep(1.2)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode in (os.EX_TEMPFAIL, 128 + signal.SIGTERM)
    assert not psutil.wait_procs(workers, timeout=5)[1]
