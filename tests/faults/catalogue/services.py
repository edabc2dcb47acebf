"""Faults of a scoring service."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from tests.faults.catalogue.signals import INTERRUPTED
from tests.faults.entry import LOAD, Act, Entry, Moment, Outcome, codes
from tests.faults.service import Answers, Fault
from tests.faults.trial import Trial

ALWAYS = 10**9
NAMED = r"scorer\.url="  # the message names the key


def status(number: int, body: bytes = b"no", **headers: str) -> Fault:
    """Return a fault: an answer with another status."""

    def fault(answers: Answers, count: int) -> bool:
        answers.reply(number, body, **headers)
        return True

    return fault


def scores(change: str) -> Fault:
    """Return a fault: a wrong number of scores, or scores that are no finite numbers."""

    def fault(answers: Answers, count: int) -> bool:
        given: dict[str, object] = {
            "fewer": {"scores": [0.0] * (count - 1)},
            "more": {"scores": [0.0] * (count + 1)},
            "none": {"scores": []},
            "nan": {"scores": [float("nan")] * count},
            "infinite": {"scores": [float("inf")] * count},
            "null": {"scores": [None] * count},
            "texts": {"scores": ["good"] * count},
            "other_key": {"rewards": [0.0] * count},
            "list": [0.0] * count,
        }
        answers.reply(200, given[change])
        return True

    return fault


def hang(answers: Answers, count: int) -> bool:
    """Answer nothing."""
    answers.server.pause(600)
    answers.reset()
    return True


def reset(answers: Answers, count: int) -> bool:
    """Reset the connection."""
    answers.reset()
    return True


def cut(answers: Answers, count: int) -> bool:
    """Close the connection in the middle of the answer."""
    answers.begin(200, 1000)
    answers.wfile.write(b'{"scores": [0.1, ')
    answers.close_connection = True
    return True


def dripping(answers: Answers, count: int) -> bool:
    """Send one byte of the answer each 0.2 s, without an end."""
    answers.begin(200, 10**6)
    try:
        while not answers.server.closing:
            answers.wfile.write(b" ")
            answers.wfile.flush()
            answers.server.pause(0.2)
    except OSError:
        pass
    answers.close_connection = True
    return True


def huge(answers: Answers, count: int) -> bool:
    """Send an answer of 400 MB."""
    answers.begin(200, 4 * 10**8)
    try:
        for _ in range(400):
            answers.wfile.write(bytes(10**6))
    except OSError:
        pass
    answers.close_connection = True
    return True


def endless(answers: Answers, count: int) -> bool:
    """Send an answer without an end and without a length."""
    answers.begin(200, None)
    end = time.monotonic() + 30
    try:
        while time.monotonic() < end and not answers.server.closing:
            answers.wfile.write(b"[" * 10**6)
    except OSError:
        pass
    answers.close_connection = True
    return True


TRANSIENT: dict[str, Fault] = {
    "500": status(500),
    "503": status(503),
    "429": status(429),
    "502_html": status(502, b"<html>bad gateway</html>", Content_Type="text/html"),
    "retry_after_0": status(503, b"", Retry_After="0"),
    "retry_after_1": status(429, b"", Retry_After="1"),
    "reset": reset,
    "cut": cut,
    "hang": hang,
}
PERSISTENT: dict[str, Fault] = TRANSIENT | {
    "404": status(404),
    "401": status(401),
    "redirect": status(302, b"", Location="http://127.0.0.1:9/else"),
    "retry_after_100000": status(503, b"", Retry_After="100000"),
    "retry_after_date": status(503, b"", Retry_After="Fri, 31 Dec 2100 23:59:59 GMT"),
    "retry_after_text": status(503, b"", Retry_After="soon"),
    "garbage": status(200, bytes(range(256))),
    "empty": status(200, b""),
    "html": status(200, b"<html>hello</html>"),
    "cut_json": status(200, b'{"scores": [0.1, 0.2'),
    "gzip": status(200, b"\x1f\x8b no gzip", Content_Encoding="gzip"),
    "dripping": dripping,
    "huge": huge,
    "endless": endless,
    **{name: scores(name) for name in ("fewer", "more", "none", "nan", "infinite", "null", "texts")},
    "other_key": scores("other_key"),
    "list": scores("list"),
}


def failing(fault: Fault, times: int) -> Act:
    """Return an act that replaces the next answers of the service."""

    def act(trial: Trial) -> None:
        count = times if times == ALWAYS else trial.draw.randint(1, times)
        trial.service.fail(fault, count)
        trial.note(f"{'all' if times == ALWAYS else count} answers")

    return act


def recover(trial: Trial) -> None:
    """Let the service answer as usual."""
    trial.service.recover()


def refused(seconds: float | None) -> Act:
    """Return an act that closes the service, for a while or for ever."""

    def act(trial: Trial) -> None:
        trial.service.close()
        if seconds is not None:
            time.sleep(trial.draw.uniform(0.2, seconds))
            trial.service.open()
        trial.note("service closed" + ("" if seconds is None else " for a while"))

    return act


def signalled(fault: Fault, number: int, count: int = 1) -> Act:
    """Return an act that sends signals while the command waits for the service."""

    def act(trial: Trial) -> None:
        trial.service.fail(fault)
        server, end = trial.service.server, time.monotonic() + 20
        while server and not server.struck and trial.session.code is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(trial.draw.uniform(0.1, 0.8))
        for i in range(count):
            if i:
                time.sleep(1.1)
            if trial.session.code is None:
                os.killpg(trial.session.process.pid, number)
        trial.note(f"{count} x {signal.Signals(number).name} while the service does not answer")

    return act


def entries() -> Iterator[Entry]:
    """Yield the entries."""
    at = Moment("wait", (1, 2, 3, 4, 5), spread_s=0.05)
    group = "Scoring service: error status, hang, reset or cut answer, once or twice"
    for name, fault in TRANSIENT.items():
        for run in ("http", "http_lag") if name in ("500", "reset", "hang") else ("http",):
            yield Entry(f"service.once.{name}.{run}", group, run, failing(fault, 2), at=at)
    group = "Scoring service: error status, hang, reset, cut, slow, huge or wrong answers, always"
    for name, fault in PERSISTENT.items():
        run = "http_lag" if name in ("500", "huge", "dripping", "nan") else "http"
        act, outcome = failing(fault, ALWAYS), Outcome(codes(_1=NAMED))
        more = {"repair": recover, "words": ("scorer.timeout_s=1", "scorer.retries=1")}
        yield Entry(f"service.always.{name}", group, run, act, outcome, at, **more)
    group = "Scoring service: signal while the run waits for an answer"
    for name, fault in (("hang", hang), ("retry_after", status(503, b"", Retry_After="5"))):
        for number, code in ((signal.SIGTERM, {75: INTERRUPTED}), (signal.SIGINT, {130: ""})):
            outcome = Outcome({0: "", **code, 1: NAMED})
            more = {"repair": recover, "words": ("scorer.timeout_s=30", "scorer.retries=5")}
            name_ = f"service.{name}.{signal.Signals(number).name.lower()}"
            yield Entry(name_, group, "http", signalled(fault, number), outcome, at, **more)
    second, more = Moment("wait", (2,)), {"repair": recover, "words": ("scorer.timeout_s=60",)}
    act, outcome = signalled(hang, signal.SIGTERM, 2), Outcome(codes(75, 143))
    yield Entry("service.hang.sigterm_twice", group, "http_lag", act, outcome, second, **more)
    group = "Scoring service: `kill -9` while the run waits for an answer"
    act, outcome = signalled(hang, signal.SIGKILL), Outcome(codes(-9))
    yield Entry("service.kill.hang", group, "http_lag", act, outcome, second, **more)
    group = "Scoring service: connections refused, for a while or always"
    outcome = Outcome(codes(_1=NAMED, _2=r"scorer\.url"))
    yield Entry("service.down.start", group, "http", refused(None), outcome, repair=recover)
    outcome, at = Outcome(codes(0, _1=NAMED)), Moment(LOAD, spread_s=1.0)
    yield Entry("service.down.during", group, "http", refused(None), outcome, at, repair=recover)
    at, words = Moment("wait", (2, 3)), ("scorer.retries=5",)
    yield Entry("service.restarted", group, "http_lag", refused(0.6), at=at, words=words)


ENTRIES = tuple(entries())
