"""Calls of environments with a time limit, in threads or in an event loop.

A thread cannot be killed. A call that takes too long is given up, and its thread is abandoned and replaced.
Processes that calls start may outlive their threads; they are killed when this process ends.
Global settings that calls change are restored when no call runs: a call may change them for its own time.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any

from rlhf.core.protection import same_settings
from rlhf.processes.groups import note_children

_GRACE_S = 1.0  # an event loop ends a call that takes too long itself, unless it is blocked
_POLL_S = 0.5  # between two looks at the time limit
_MOST_HANGING = 3
_abandoned: list[Thread] = []  # threads of this process that did not return in time
_idle: list[_Loop] = []  # event loops without calls: clients of the user's code belong to the loop they know


@dataclass(eq=False, slots=True)
class Call:
    """A call and its outcome."""

    key: Any  # the name that the caller gives it
    function: Callable[[], Any]
    result: Any = None  # what the function returned
    error: BaseException | None = None  # what it raised; a `TimeoutError` if it was given up
    late: bool = False  # it was given up
    frames: Sequence[tuple[str, int]] = ()  # files and lines where it failed, the innermost last
    seconds: float = 0.0  # how long it took
    thread: _Worker | _Loop | None = None
    began: float = math.inf  # in the thread
    taken: Lock = field(default_factory=Lock)  # by the first who has an outcome

    def end(self, result: Any = None, error: BaseException | None = None, late: bool = False) -> bool:
        """Set the outcome, and return True; False: the call has an outcome."""
        if not self.taken.acquire(blocking=False):
            return False
        self.seconds, self.result, self.late = perf_counter() - self.began, result, late
        self.error = TimeoutError(f"no answer in {self.seconds:.3g} s") if late else error
        walk = [*traceback.walk_tb(error.__traceback__ if error else None)]
        if late and not error and self.thread:
            walk = [*traceback.walk_stack(sys._current_frames().get(self.thread.ident or 0))][::-1]
        files = ((frame.f_code.co_filename, line) for frame, line in walk)
        self.frames = [each for each in files if each[0] != __file__]
        return True


class _Worker(Thread):
    """A thread that makes calls one by one, until it gets None or its call is given up."""

    def __init__(self, asked: SimpleQueue[Call | None], ended: SimpleQueue[Call]) -> None:
        super().__init__(name="environment", daemon=True)
        self.asked, self.ended, self.ask = asked, ended, asked.put
        self.start()

    def run(self) -> None:
        while call := self.asked.get():
            call.thread, call.began, result, error = self, perf_counter(), None, None
            process = os.getpid()
            try:
                result = call.function()
            except BaseException as raised:  # code of the user may raise anything, such as SystemExit
                error = raised
            if os.getpid() != process:  # a child that the code forked
                os._exit(os.EX_OK)
            if not call.end(result, error):
                return
            self.ended.put(call)


class _Loop(Thread):
    """A thread with an event loop, which makes all calls at the same time, until it gets None."""

    ended: SimpleQueue[Call]
    limit_s: float

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.loop, self.stopped = asyncio.new_event_loop(), asyncio.Event()
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # at its end, it cancels all tasks
            runner.run(self.stopped.wait())

    def ask(self, call: Call | None) -> None:
        if call is None:
            self.loop.call_soon_threadsafe(self.stopped.set)
        else:
            call.thread = self
            asyncio.run_coroutine_threadsafe(self.make(call, self.ended, self.limit_s), self.loop)

    async def make(self, call: Call, ended: SimpleQueue[Call], limit_s: float) -> None:
        call.began, result, error, limit = perf_counter(), None, None, asyncio.timeout(limit_s)
        try:
            async with limit:
                result = call.function()
                result = await result if inspect.isawaitable(result) else result
        except BaseException as raised:  # as in `_Worker`
            origin = raised.__cause__ or raised.__context__  # before Python 3.11.4, a timeout has no cause
            error = origin if limit.expired() and origin else raised
        if call.end(result, error, limit.expired()):
            ended.put(call)


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
        self._settings = ExitStack()  # those before the open calls
        self._asked, self._ended = SimpleQueue[Call | None](), SimpleQueue[Call]()
        self._threads = [self._thread() for _ in range(1 if in_loop else threads)]

    def _thread(self) -> _Worker | _Loop:
        if not self.in_loop:
            return _Worker(self._asked, self._ended)
        _idle[:] = [loop for loop in _idle if loop.is_alive()]  # a process that was forked has none
        loop = _idle.pop() if _idle else _Loop()
        loop.name, loop.ended, loop.limit_s = "environment", self._ended, self.limit_s
        return loop

    def ask(self, key: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Make a call as soon as a thread is free."""
        call = Call(key, partial(function, *arguments))
        if not self.open:
            self._settings.enter_context(same_settings())
        self.open[call] = None
        self._threads[0].ask(call)

    def ended(self, wait_s: float = 0.0) -> list[Call]:
        """Return the calls that ended, also those given up; wait at most `wait_s` for the first one."""
        found: list[Call] = []
        until = perf_counter() + wait_s
        while self.open:
            left = 0.0 if found else min(until - perf_counter(), _POLL_S, self.limit_s)
            try:
                found.append(self._ended.get(timeout=max(0.0, left)))
                del self.open[found[-1]]
            except Empty:
                found += self._give_up(self.limit_s + (_GRACE_S if self.in_loop else 0.0))
                if found or perf_counter() >= until:
                    break
        if not self.open:
            self._settings.close()
        return found

    def _give_up(self, after_s: float = 0.0) -> list[Call]:
        """Give up the calls that take longer than `after_s`, and replace their threads."""
        until = perf_counter() - after_s
        late = [call for call in self.open if call.began <= until and call.end(late=True)]
        if late and self.in_loop:  # it is blocked, so that no call returns
            late += [call for call in self.open if call.end(late=True)]
        for thread in {call.thread for call in late if call.thread}:
            _abandoned.append(thread)
            note_children(thread.native_id or 0)
            self._threads[self._threads.index(thread)] = self._thread()
            if isinstance(thread, _Loop):
                thread.ask(None)
        for call in late:
            del self.open[call]
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
        for functions in ((), last):
            for function in functions:
                self.ask(None, function)
            until = perf_counter() + within_s
            while self.open and (left := until - perf_counter()) > 0:
                self.ended(left)
            self._give_up()
            self._settings.close()
        workers = [thread for thread in self._threads if isinstance(thread, _Worker)]
        for thread in self._threads:
            note_children(thread.native_id or 0)
            if isinstance(thread, _Loop):
                thread.name = "idle event loop"
                _idle.append(thread)
        for worker in workers:
            worker.ask(None)
        for worker in workers:
            worker.join(_GRACE_S)
        self._threads = []


def asynchronous(function: object) -> bool:
    """Return whether the results of a function, or of a callable object, must be awaited."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def too_many_hang() -> bool:
    """Return whether three abandoned threads of this process still run."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    return len(_abandoned) >= _MOST_HANGING
