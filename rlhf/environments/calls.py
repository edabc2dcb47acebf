"""Calls of environments with a time limit, in threads or in an event loop.

A thread cannot be killed. A call that takes too long is given up, and its thread is abandoned and replaced.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from types import FrameType
from typing import Any

_GRACE_S = 1.0  # an event loop ends a call that takes too long itself, unless it is blocked
_POLL_S = 0.5  # between two looks at the time limit
_MOST_HANGING = 3
_abandoned: list[Thread] = []  # threads of this process that did not return in time


class Call:
    """A call and its outcome.

    Attributes:
        key: the name that the caller gives it.
        result: what the function returned.
        error: what it raised; a `TimeoutError` if it was given up.
        late: it was given up.
        frames: files and lines where it failed, the innermost last.
        seconds: how long it took.
    """

    def __init__(self, key: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.key, self.function, self.arguments = key, function, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.late = False
        self.frames: list[tuple[str, int]] = []
        self.began = self.seconds = 0.0
        self._taken = Lock()

    def take(self) -> bool:
        """Return whether the call has no outcome yet; only the first caller may give it one."""
        return self._taken.acquire(blocking=False)

    def finish(
        self,
        result: Any = None,
        error: BaseException | None = None,
        late: bool = False,
        stack: Iterable[tuple[FrameType, int]] = (),
    ) -> None:
        """Set the outcome; `stack` is where a call without an error is."""
        self.seconds, self.result, self.late = perf_counter() - self.began, result, late
        self.error = TimeoutError(f"no answer in {self.seconds:.3g} s") if late else error
        walk = traceback.walk_tb(error.__traceback__) if error else stack
        files = ((frame.f_code.co_filename, line) for frame, line in walk)
        self.frames = [each for each in files if each[0] != __file__]


class _Worker(Thread):
    """A thread that makes calls one by one, until it gets None or its call is given up."""

    def __init__(self, asked: SimpleQueue[Call | None], ended: SimpleQueue[Call]) -> None:
        super().__init__(name="environment", daemon=True)
        self.asked, self.ended = asked, ended
        self.call: Call | None = None
        self.start()

    def run(self) -> None:
        while call := self.asked.get():
            call.began, result, error = perf_counter(), None, None
            self.call = call
            try:
                result = call.function(*call.arguments)
            except BaseException as raised:  # code of the user may raise anything, such as SystemExit
                error = raised
            self.call = None
            if not call.take():
                return
            call.finish(result, error)
            self.ended.put(call)

    def stop(self) -> None:
        self.asked.put(None)


class _Loop(Thread):
    """A thread with an event loop, which makes all calls at the same time."""

    def __init__(self, ended: SimpleQueue[Call], limit_s: float) -> None:
        super().__init__(name="environment", daemon=True)
        self.ended, self.limit_s = ended, limit_s
        self.loop, self.stopped = asyncio.new_event_loop(), asyncio.Event()
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # at its end, it cancels all tasks
            runner.run(self.stopped.wait())

    def ask(self, call: Call) -> None:
        call.began = perf_counter()
        asyncio.run_coroutine_threadsafe(self.make(call), self.loop)

    async def make(self, call: Call) -> None:
        result, error, limit = None, None, asyncio.timeout(self.limit_s)
        try:
            async with limit:
                result = call.function(*call.arguments)
                result = await result if inspect.isawaitable(result) else result
        except BaseException as raised:  # as in `_Worker`
            error = raised.__cause__ if limit.expired() and raised.__cause__ else raised
        if call.take():
            call.finish(result, error, late=limit.expired())
            self.ended.put(call)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)


class Calls:
    """Calls in daemon threads.

    Args:
        threads: the number of calls at a time; the others wait for their turn.
        limit_s: the most seconds of a call.
        in_loop: functions are asynchronous; all calls are made at the same time, in one event loop.
    """

    def __init__(self, threads: int, limit_s: float, in_loop: bool = False) -> None:
        self.limit_s, self.in_loop = limit_s, in_loop
        self.open: dict[Call, None] = {}  # in the order in which they were asked
        self._asked, self._ended = SimpleQueue[Call | None](), SimpleQueue[Call]()
        self._threads = [self._thread() for _ in range(1 if in_loop else threads)]

    def _thread(self) -> _Worker | _Loop:
        return _Loop(self._ended, self.limit_s) if self.in_loop else _Worker(self._asked, self._ended)

    def ask(self, key: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Make a call as soon as a thread is free."""
        call = Call(key, function, arguments)
        self.open[call] = None
        if isinstance(thread := self._threads[0], _Loop):
            thread.ask(call)
        else:
            self._asked.put(call)

    def ended(self, wait_s: float = 0.0) -> list[Call]:
        """Return the calls that ended, also those given up; wait at most `wait_s` for the first one."""
        found: list[Call] = []
        until = perf_counter() + wait_s
        while self.open:
            left = 0.0 if found else min(until - perf_counter(), _POLL_S, self.limit_s)
            try:
                found.append(self._ended.get(timeout=left) if left > 0 else self._ended.get_nowait())
                del self.open[found[-1]]
            except Empty:
                late = self._give_up(self.limit_s + (_GRACE_S if self.in_loop else 0.0))
                if found or late or perf_counter() >= until:
                    return found + late
        return found

    def _give_up(self, after_s: float = 0.0) -> list[Call]:
        """Give up the calls of threads that return none for `after_s`, and replace the threads."""
        late = []
        for at, thread in enumerate(self._threads):
            running = [*self.open] if isinstance(thread, _Loop) else [call] if (call := thread.call) else []
            if not running or perf_counter() - running[0].began < after_s:
                continue
            frame = sys._current_frames().get(thread.ident or 0)
            if given_up := [call for call in running if call.take()]:
                _abandoned.append(thread)
                self._threads[at] = self._thread()
                if isinstance(thread, _Loop):
                    thread.stop()
            for call in given_up:
                call.finish(late=True, stack=[*traceback.walk_stack(frame)][::-1] if frame else [])
                del self.open[call]
            late += given_up
        return late

    def close(self, within_s: float, last: Iterable[Callable[[], Any]]) -> None:
        """End the threads. No call may follow.

        Args:
            within_s: the time for the calls that run now, and for the last calls.
            last: the last calls, whose outcomes are not read.
        """
        with suppress(Empty):
            while call := self._asked.get_nowait():  # no thread has begun it
                del self.open[call]
        self._wait(within_s)
        for function in last:
            self.ask(None, function)
        self._wait(within_s)
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join(_GRACE_S)

    def _wait(self, within_s: float) -> None:
        until = perf_counter() + within_s
        while self.open and (left := until - perf_counter()) > 0:
            self.ended(left)
        self._give_up()


def too_many_hang() -> bool:
    """Return whether three abandoned threads of this process still run."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    return len(_abandoned) >= _MOST_HANGING
