"""Signals that stop a run so that it can be resumed: SIGTERM, SIGUSR1, SIGUSR2 and SIGINT (Ctrl-C).

SLURM sends SIGUSR1 before a job's time limit if the batch script requests it, and SIGUSR2 to submitit's jobs.

    with interruptible() as interruption:  # around a run, a stage of a run, or all runs of a command
        ...                                # a signal raises Interrupted, because no unsaved work exists here
        interruption.defer()
        while ...:
            ...                            # a signal only sets a flag here
            if interruption.asked():       # at the end of an update
                return

A second SIGTERM or Ctrl-C ends the process immediately, even during an update. A Ctrl-C outside of training
raises KeyboardInterrupt. This module does not import torch.
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401  # at exit it waits for children, after `_kill_noted`, which comes later
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from rlhf.core import launched
from rlhf.core.errors import Interrupted
from rlhf.core.launched import is_first_rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

PATIENCE_S = 30.0  # seconds between a signal and the message that the current update is not finished
# Seconds; signals closer than this count as one signal, because a launcher may forward a signal that the
# process has already received.
ECHO_S = 1.0


class Interruption:
    """The state of signal handling in this process: whether a signal asked it to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first signal
        self.deferred = False  # a signal does not raise Interrupted, but sets the flag of `asked`
        self.requested = False  # the run itself asked to stop
        self.raised = False  # the handler raised an exception, which a library may have replaced by another
        self.callbacks: set[Callable[[], None]] = set()  # called after the first signal; see `call_at_signal`
        self.agree: Callable[[bool], bool] = bool  # returns whether a flag is set on any rank
        self.previous: dict[signal.Signals, Any] = {}  # signal handlers to restore
        self.previous_wakeup = -1  # wakeup file descriptor to restore

    @property
    def cause(self) -> str:
        """The name of the received signal as text, for messages."""
        return name(self.received) if self.received else "a signal to another rank"

    def defer(self, agree: Callable[[bool], bool] = bool) -> None:
        """Defer signals: from now on they do not raise Interrupted, but set the flag that `asked` returns.

        Args:
            agree: returns whether a flag is set on any rank (`Ranks.any`), so that all ranks stop together;
                `bool`: there is one rank.

        Raises:
            Interrupted: a signal was received before.
        """
        self.deferred, self.agree = True, agree
        self.check()

    def request(self) -> None:
        """Ask the run to stop at the end of its update, with a checkpoint, as after a signal."""
        self.requested = True

    def asked(self) -> bool:
        """Return whether any rank is to stop; all ranks must call `asked` at the same point."""
        return self.agree(self.received is not None or self.requested)

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self.received is not None:
            raise Interrupted(
                f"interrupted by {self.cause} outside of training, so there is nothing to save; the same "
                "command resumes the run",
                self.received,
            )

    def check_ranks(self) -> None:
        """Raise Interrupted if any rank received a signal; all ranks must call this at the same point."""
        if self.agree(self.received is not None):
            raise Interrupted(f"interrupted by {self.cause}", self.received)

    def check_alone(self) -> None:
        """Raise Interrupted if a signal was received; with several ranks, which must agree first, go on."""
        if self.agree is bool:
            self.check_ranks()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal, in the main thread. Later signals are ignored so that clean-up can finish.

        Raises:
            Interrupted: this is the first signal, it is not SIGINT, and signals are not deferred.
            KeyboardInterrupt: this is the first signal, it is SIGINT, and signals are not deferred.
        """
        if self.received is None:
            self.received = signal.Signals(number)
            if not self.deferred:
                self.raised = True
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                self.check()

    def listen(self, signals: socket.socket) -> None:
        """Print messages while the run stops, and end the process at a second SIGTERM or Ctrl-C.

        The method runs in a separate thread. The main thread handles a signal only after the current kernel
        or collective, which may never return. The C-level signal handler writes the number of each signal to
        a socket (`signal.set_wakeup_fd`).

        Args:
            signals: the socket with the numbers of the signals.
        """
        began: float | None = None  # when the first signal came
        second = "SIGTERM"  # name of the signal that ends the process, after the first signal
        terminated: float | None = None  # when the first SIGTERM came
        with signals:
            while True:
                try:
                    number = signals.recv(1)
                except TimeoutError:
                    signals.settimeout(None)
                    tell(
                        f"still waiting for the current operation, {PATIENCE_S:g} seconds after the signal; "
                        f"a second {second} ends the run immediately, to be resumed from its last checkpoint"
                    )
                    continue
                if not number:
                    return
                if number[0] not in self.previous:
                    continue
                now = time.monotonic()
                if began is None:
                    began = now
                    received = signal.Signals(number[0])
                    when = " after the current update, with a checkpoint" if self.deferred else ""
                    if received is signal.SIGINT:
                        second = name(received)
                    tell(f"{name(received)}: stopping{when}; a second {second} ends the run immediately")
                    signals.settimeout(PATIENCE_S)
                    for call in list(self.callbacks):
                        threading.Thread(target=call, daemon=True).start()
                if number[0] == signal.SIGTERM:
                    terminated = terminated or now
                    if now - terminated > ECHO_S:
                        _end_now(signal.SIGTERM)
                if number[0] == signal.SIGINT and now - began > ECHO_S:
                    _end_now(signal.SIGINT)

    def install(self) -> threading.Thread:
        """Install the signal handlers, and return the thread that runs `listen`."""
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        listener = threading.Thread(target=self.listen, args=(ours,), name="signals", daemon=True)
        listener.start()
        self.previous_wakeup = signal.set_wakeup_fd(self.theirs.fileno())
        # SIGINT stays ignored where it is ignored: in a background job of a shell, and in a job of a sweep.
        ctrl_c = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, launched.end)
        for number in (*SIGNALS, *([signal.SIGINT] if ctrl_c else [])):
            self.previous[number] = signal.signal(number, self.handle)
        return listener

    def restore(self, ended: Any = signal.SIG_IGN) -> None:
        """Restore the previous signal handlers; `ended` is that of a command, which only has to exit."""
        for number, handler in self.previous.items():
            signal.signal(number, ended if handler is launched.end else handler)
        signal.set_wakeup_fd(self.previous_wakeup)


active: Interruption | None = None  # the Interruption of this process, inside `interruptible`


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Handle the signals during the block, and restore the previous handlers after the block.

    A nested call yields the same Interruption. So an interrupted stage also stops its run, and an interrupted
    run also stops its sweep. Only the main thread receives signals. In another thread the Interruption is
    never set.

    Raises:
        Interrupted: the call is nested, and a signal was received before.
    """
    global active
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
    elif active is not None:
        active.check()
        try:
            yield active
        finally:
            active.deferred = active.requested = False
    else:
        active = Interruption()
        listener = active.install()
        try:
            yield active
        finally:
            active.restore()
            active.theirs.shutdown(socket.SHUT_RDWR)  # ends the listener thread
            active.theirs.close()
            active = None
            # The main thread may have been interrupted between locking the terminal and the `try` that
            # unlocks it. Then the listener, which prints, waits forever.
            listener.join(timeout=ECHO_S)


def _end_now(number: signal.Signals) -> NoReturn:
    """Kill the child processes of this process and end it, even if its main thread is blocked.

    Worker processes are not killed: they remove their temporary files and end when their trainer has ended.
    """
    text = f"ended immediately by a second {name(number)}; the same command resumes the run"
    # Another thread prints the message, because a blocked thread may have locked the terminal.
    message = threading.Thread(target=tell, args=(text,), daemon=True)
    message.start()
    message.join(timeout=1)
    kill_children()
    os._exit(128 + number)


def call_at_signal(call: Callable[[], None]) -> None:
    """Call a function in a thread of its own after the first signal that does not end the run at once."""
    if active is not None:
        active.callbacks.add(call)


def do_not_call_at_signal(call: Callable[[], None]) -> None:
    """Undo `call_at_signal`."""
    if active is not None:
        active.callbacks.discard(call)


def end_wait() -> None:
    """Raise Interrupted if a signal was received, also where signals are deferred; for use in a long wait."""
    if active is not None:
        active.check()


def _block(how: int) -> None:
    """Block `SIGNALS` before a fork, or unblock them after it."""
    if active is not None:
        signal.pthread_sigmask(how, SIGNALS)


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike with SIG_IGN, the processes that this process starts do not ignore the signal."""


def _leave_alone() -> None:
    """Restore the previous signal handlers after a fork, in the child process; the defaults in place of ours.

    Otherwise a process that the user's code forks and terminates, such as a pool of processes, would not end.
    """
    global active
    if active is not None:
        active.restore(ended=ignore)
        active.theirs.close()
    for number in (*SIGNALS, signal.SIGINT):
        if signal.getsignal(number) in (ignore, launched.end):  # SIG_IGN comes from outside: keep it
            signal.signal(number, launched.default(number))
    _block(signal.SIG_UNBLOCK)  # a signal that came before ends the process
    active = None


os.register_at_fork(
    before=partial(_block, signal.SIG_BLOCK),
    after_in_parent=partial(_block, signal.SIG_UNBLOCK),
    after_in_child=_leave_alone,
)


def name(number: signal.Signals) -> str:
    """Return the name of a signal for messages."""
    return "Ctrl-C" if number is signal.SIGINT else number.name


def tell(text: str) -> None:
    """Print a line on the first rank only."""
    from rlhf.terminal.console import say

    if is_first_rank():
        say(text, style="yellow")


# End of the processes of a process group, and of those that a thread started.


_TRACKER = "multiprocessing.resource_tracker"  # in the command of Python's resource tracker
_POLL_S = 0.5  # seconds between checks whether the processes with which this one ends still run
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
            if os.getpgid(pid) == group and _runs(psutil.Process(pid)):
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
                    family = process, *process.children(recursive=True)
                    found |= {each.pid for each in family if _runs(each)}
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


# A process that ends with others: a worker with its trainer, a server with the process that started it, and
# a run of a study or a job of a sweep with the process of the command.


PARENT = "RLHF_PARENT"  # environment variable: the process with which a process and its group end
SCRATCH = "RLHF_SCRATCH"  # environment variable: the folder for temporary files of such a process alone
left: set[str] = set()  # further folders that `end_group` removes


def end_group() -> NoReturn:
    """Kill the group of this process, remove its own folder and those in `left`, and kill this process."""
    kill_group(os.getpgrp(), spared=os.getpid())
    for _, folder in product(range(_ROUNDS), (os.environ.get(SCRATCH, ""), *left)):  # threads may write to it
        if os.path.exists(folder):
            shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process was killed")


def at_end_of(others: Collection[int], call: Callable[[], object]) -> None:
    """Call a function, in a thread of its own, as soon as one of some processes has ended."""

    def run() -> None:
        with suppress(psutil.NoSuchProcess):
            while all(_runs(psutil.Process(other)) for other in others):
                time.sleep(_POLL_S)
        call()

    threading.Thread(target=run, daemon=True).start()


def end_with_others() -> None:
    """End the group as soon as the process that started it or its own main process has ended.

    In a process without the environment variable `PARENT`, nothing happens.
    """
    if parent := os.environ.get(PARENT):
        at_end_of((int(parent), os.getpgrp()), end_group)
