"""Parallel calls with time limits and retries, and the signals that end their waits."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from rlhf.config.scorers import HttpScorerConfig
from rlhf.core.errors import Interrupted
from rlhf.processes import signals
from rlhf.scorers.http import Again, backoff, in_parallel

LIMITS = HttpScorerConfig(concurrency=2, timeout_s=0.3, retries=2)
QUICK = {"limits": LIMITS, "late": lambda: TimeoutError("late")}


def test_answers_keep_the_order_of_calls():
    assert in_parallel(lambda i, _: time.sleep(0.05 * (i % 3)) or i, 7, **QUICK) == list(range(7))
    assert in_parallel(lambda i, _: i, 0, **QUICK) == []


def test_no_more_calls_run_in_parallel_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def do(i, deadline):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    in_parallel(do, 8, **QUICK)
    assert most == 2


def test_a_failed_call_is_repeated_and_its_last_error_is_raised():
    tries = []

    def fail(i, deadline):
        tries.append(i)
        raise Again(OSError(f"try {len(tries)}"), wait_s=0.01)

    with pytest.raises(OSError, match="try 3"):
        in_parallel(fail, 1, **QUICK)
    assert tries == [0, 0, 0]
    with pytest.raises(KeyError):  # another error is not repeated
        in_parallel(lambda i, _: {}[tries.append(i)], 1, **QUICK)
    assert len(tries) == 4 and [backoff(tries) for tries in (1, 2, 3, 4, 20)] == [0, 1, 2, 4, 120]


def test_a_call_that_never_returns_is_abandoned_at_its_time_limit():
    tries = []

    def hang(i, deadline):
        tries.append(deadline - time.monotonic())
        threading.Event().wait(1 if len(tries) == 1 else 0)
        return "late" if len(tries) == 1 else "in time"

    start = time.monotonic()
    assert in_parallel(hang, 1, **QUICK) == ["in time"]
    assert time.monotonic() - start < 0.9 and tries == pytest.approx([0.3, 0.3], abs=0.1)
    with pytest.raises(TimeoutError, match="late"):
        in_parallel(lambda *_: time.sleep(1), 1, **{**QUICK, "limits": replace(LIMITS, retries=0)})


def test_the_late_answer_of_an_abandoned_try_is_ignored():
    tries = []

    def slow(i, deadline):
        tries.append(i)
        number = len(tries)
        time.sleep(0.45 if number == 1 else 0.25)  # the first try returns while the second one runs
        return number

    assert in_parallel(slow, 1, **QUICK) == [2]


@pytest.mark.parametrize("wait", ["a try", "a retry"])
def test_a_deferred_signal_ends_a_wait_within_a_second(monkeypatch, wait):
    monkeypatch.setattr(signals, "tell", lambda text: None)

    def do(i, deadline):
        if wait == "a try":
            threading.Event().wait(5)
        raise Again(OSError(), wait_s=100)

    with signals.interruptible() as interruption:
        interruption.defer()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        start = time.monotonic()
        with pytest.raises(Interrupted):
            in_parallel(do, 1, **{**QUICK, "limits": replace(LIMITS, timeout_s=100)})
        assert time.monotonic() - start < 1.3
