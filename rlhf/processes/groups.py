"""End of the processes of a process group, and of those that a thread started. It imports no torch."""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401  # at exit it waits for children, after `_kill_noted`, which comes later
import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

_TRACKER = "multiprocessing.resource_tracker"  # in the command of Python's resource tracker
_ROUNDS = 100  # a process may start another one between the search and the kill
_noted: set[psutil.Process] = set()


def kill_group(group: int, spared: int | None = None) -> None:
    """Kill the processes of a group, but not the resource trackers of Python's multiprocessing.

    A resource tracker ends when the processes that use it have ended, and then removes the named shared
    memory and semaphores that they left behind.

    Args:
        group: id of the process group.
        spared: id of a process of the group that is not killed either.
    """
    _kill(lambda: {*members(group)} - {spared})


def members(group: int) -> list[int]:
    """Return the ids of the running processes of a group, except zombies and resource trackers."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) != group:
                continue
            if _runs(psutil.Process(pid)):
                found.append(pid)
    return found


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has memory, as a zombie has not, and is no resource tracker."""
    tracks = any(_TRACKER in argument for argument in process.cmdline())
    return not tracks and process.memory_info().vms > 0


def note_children(thread: int) -> None:
    """Note the processes that a thread of this process started, which are killed when this process ends.

    Linux knows which thread started a process as long as the thread lives. Elsewhere, nothing is noted.

    Args:
        thread: its native id.
    """
    with suppress(OSError):
        for pid in Path(f"/proc/self/task/{thread}/children").read_text().split():
            with suppress(psutil.NoSuchProcess):
                _noted.add(psutil.Process(int(pid)))


@atexit.register
def _kill_noted() -> None:
    """Kill the noted processes and their descendants."""

    def find() -> set[int]:
        found: set[int] = set()
        for process in _noted:
            with suppress(psutil.Error):
                if process.ppid() == os.getpid():  # not if this is a fork
                    found |= {
                        each.pid for each in (process, *process.children(recursive=True)) if _runs(each)
                    }
        return found

    _kill(find)


def kill_children() -> None:
    """Kill the descendants of this process in its own process group; it is about to end.

    From now on `multiprocessing` starts no process: a pool would replace those that are killed.
    """
    BaseProcess.start = lambda self: threading.Event().wait()  # type: ignore[assignment,method-assign]
    group, this = os.getpgrp(), psutil.Process()
    _kill(lambda: {child.pid for child in this.children(recursive=True)} & {*members(group)})


def _kill(find: Callable[[], Collection[int]]) -> None:
    """Kill the processes that `find` returns, until it returns none."""
    for _ in range(_ROUNDS):
        due = find()
        for pid in due:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not due:
            return
