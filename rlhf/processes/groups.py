"""End of the processes of a process group. This module imports no torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.process import BaseProcess

import psutil

_TRACKER = "multiprocessing.resource_tracker"  # in the command of Python's resource tracker
_ROUNDS = 100  # a process may start another one between the search and the kill


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
            process = psutil.Process(pid)
            tracks = any(_TRACKER in argument for argument in process.cmdline())
            if not tracks and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(pid)
    return found


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
