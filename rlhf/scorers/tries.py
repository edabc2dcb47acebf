"""Calls in parallel daemon threads, each with a time limit and retries, while the calling thread waits.

A thread that is blocked in a system call cannot be stopped, for example in a connection to a host that does
not answer. So the calling thread abandons a try at its deadline, and the thread ends when its call returns.
Only the calling thread waits between tries, in steps of `_POLL_S`. Therefore a signal ends every wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from rlhf.processes.signals import end_wait

T = TypeVar("T")

_POLL_S = 0.2  # seconds between checks for a signal
_LONGEST_WAIT_S = 120.0  # longest wait before a retry, unless the error has another `wait_s`


class Again(Exception):
    """A failed try that may be repeated.

    Args:
        error: the error to raise if no try is left.
        wait_s: seconds until the next try; None: `backoff`.
    """

    def __init__(self, error: Exception, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


@dataclass(slots=True)
class Call:
    """The state of one call.

    Attributes:
        due: time of the deadline of a running try, or of the start of the next try (`time.monotonic`).
        tries: number of tries that were started.
        running: whether a try runs.
    """

    due: float
    tries: int = 0
    running: bool = False


def in_parallel(
    do: Callable[[int, float], T],
    count: int,
    *,
    concurrency: int,
    timeout_s: float,
    retries: int,
    late: Callable[[], Exception],
) -> list[T]:
    """Return `do(i, deadline)` of each i below `count`, in order; the first error ends all calls.

    A call with a failed try keeps its place among the parallel calls while it waits for its next try.

    Args:
        do: the function that a thread calls; it raises `Again` if the call may be repeated, and should not
            continue after `deadline` (`time.monotonic`).
        count: number of calls.
        concurrency: maximum number of parallel calls.
        timeout_s: time limit of each try in seconds.
        retries: maximum number of repeated tries of each call.
        late: returns the error of a try that exceeded its time limit.

    Raises:
        Interrupted: a signal was received.
        Exception: an error of `do`, or of `late`, if no try is left.
    """
    outcomes: SimpleQueue[tuple[int, int, T | BaseException]] = SimpleQueue()
    answers: dict[int, T] = {}
    active: dict[int, Call] = {}

    def attempt(i: int, number: int, deadline: float) -> None:
        try:
            outcomes.put((i, number, do(i, deadline)))
        except BaseException as error:
            outcomes.put((i, number, error))

    def settle(i: int, outcome: T | BaseException) -> None:
        call = active[i]
        if isinstance(outcome, Again):
            if call.tries > retries:
                raise outcome.error
            wait_s = backoff(call.tries) if outcome.wait_s is None else outcome.wait_s
            call.running, call.due = False, time.monotonic() + wait_s
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            answers[i] = outcome
            del active[i]

    while len(answers) < count:
        end_wait()
        while len(active) < concurrency and len(answers) + len(active) < count:
            active[len(answers) + len(active)] = Call(due=time.monotonic())
        now = time.monotonic()
        for i, call in list(active.items()):
            if call.due > now:
                continue
            if call.running:
                settle(i, Again(late()))
            else:
                call.tries, call.running, call.due = call.tries + 1, True, now + timeout_s
                Thread(target=attempt, args=(i, call.tries, call.due), daemon=True).start()
        wait_s = min(call.due for call in active.values()) - time.monotonic()
        try:
            i, number, outcome = outcomes.get(timeout=min(max(wait_s, 0.0), _POLL_S))
        except Empty:
            continue
        if i in active and active[i].running and active[i].tries == number:  # else the try was abandoned
            settle(i, outcome)
    return [answers[i] for i in range(count)]


def backoff(tries: int) -> float:
    """Return the seconds between try number `tries` and the next try: 0, 1, 2, 4, ..."""
    return 0.0 if tries == 1 else min(2.0 ** (tries - 2), _LONGEST_WAIT_S)
