"""Signals that end a run early, to be gone on with: SIGTERM, and what SLURM sends before a limit, which is
SIGUSR1 where a person asks for it and SIGUSR2 where submitit does.

    with interruptible() as interruption:  # around a run, a stage within it, the runs of a command
        ...                                # a signal raises Interrupted here, where nothing is lost
        interruption.defer()
        while ...:
            ...                            # from here on it waits until it is asked for,
            if interruption.asked():       # where nothing is half done
                return

A second SIGTERM ends the process at once, whatever it is doing. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlhf.core.errors import Interrupted
from rlhf.core.launched import is_first_rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


PATIENCE_S = 30.0  # seconds until it is said that something is still waited for


ECHO_S = 1.0  # seconds; launchers pass on what their processes get too, so two signals so close are one


class Interruption:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first signal
        self.deferred = False  # it waits until it is asked for
        self.agree: Callable[[bool], bool] = bool  # whether any rank has a flag set
        self.previous: dict[signal.Signals, Any] = {}  # what was done at a signal before
        self.previous_wakeup = -1

    @property
    def cause(self) -> str:
        """Which signal it was, in words."""
        return self.received.name if self.received else "a signal to another rank"

    def defer(self, agree: Callable[[bool], bool] = bool) -> None:
        """From here on a signal waits until it is asked for.

        Args:
            agree: says of a flag whether it is set on any rank (`Ranks.any`), so that all stop together.

        Raises:
            Interrupted: one has come already.
        """
        self.deferred, self.agree = True, agree
        self.check()

    def asked(self) -> bool:
        """Whether to stop here; every rank has to ask, at the same point."""
        return self.agree(self.received is not None)

    def check(self) -> None:
        """Stop where a signal has come.

        Raises:
            Interrupted: it has.
        """
        if self.received is not None:
            raise Interrupted(
                f"interrupted by {self.cause} outside of training, where there is nothing to save; the same "
                "command goes on",
                self.received,
            )

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, in the main thread; another is no reason to break off what cleans up."""
        if self.received is None:
            self.received = signal.Signals(number)
            if not self.deferred:
                self.check()

    def listen(self, signals: socket.socket) -> None:
        """Say what was asked for, and end the process at a second SIGTERM.

        A thread of its own, which gets the numbers of `signals` from the operating system's handler: the main
        thread's turn comes only after a kernel or a collective that it may be in, or never.
        """
        began: float | None = None  # when the first signal came
        terminated: float | None = None  # when the first SIGTERM came
        with signals:
            while True:
                try:
                    number = signals.recv(1)
                except TimeoutError:
                    tell(
                        f"still waiting for what is under way, {PATIENCE_S:g} seconds after the signal; a "
                        "second SIGTERM ends the run at once, to go on from its last checkpoint"
                    )
                    signals.settimeout(None)
                    continue
                if not number:
                    return
                if number[0] not in SIGNALS:  # Ctrl-C, say
                    continue
                now = time.monotonic()
                if began is None:
                    began = now
                    name = signal.Signals(number[0]).name
                    when = " at the end of the update under way, with a checkpoint" if self.deferred else ""
                    tell(f"{name}: stopping{when}; a second SIGTERM ends the run at once")
                    signals.settimeout(PATIENCE_S)
                if number[0] == signal.SIGTERM:
                    terminated = terminated or now
                    if now - terminated > ECHO_S:
                        tell("ended at once by a second SIGTERM; the same command goes on")
                        os._exit(128 + signal.SIGTERM)

    def install(self) -> threading.Thread:
        """Take the signals over; returns the thread that listens to them."""
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        listener = threading.Thread(target=self.listen, args=(ours,), name="signals", daemon=True)
        listener.start()
        self.previous_wakeup = signal.set_wakeup_fd(self.theirs.fileno())
        for number in SIGNALS:
            self.previous[number] = signal.signal(number, self.handle)
        return listener

    def restore(self) -> None:
        """Leave the signals to whom they were before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.previous_wakeup)


active: Interruption | None = None  # of this process


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Listen to the signals for a while; what is done at them before and after is left as it is.

    Within another it is the same one, so that a stage that stops stops its run, and a run its sweep. In other
    threads than the main thread, the one that signals come to, it hears nothing.
    """
    global active
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
    elif active is not None:
        active.check()
        try:
            yield active
        finally:
            active.deferred = False
    else:
        active = Interruption()
        listener = active.install()
        try:
            yield active
        finally:
            active.restore()
            active.theirs.shutdown(socket.SHUT_RDWR)  # the listener's end
            active.theirs.close()
            active = None
            listener.join()


def hold() -> None:
    """Before a fork."""
    if active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def release() -> None:
    """After it, in the parent."""
    if active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def leave_alone() -> None:
    """After it, in the child."""
    global active
    if active is not None:
        active.restore()
        active.theirs.close()
        release()
        active = None


os.register_at_fork(before=hold, after_in_parent=release, after_in_child=leave_alone)


def tell(text: str) -> None:
    """Say it once, whatever the number of ranks."""
    from rlhf.core.console import say

    if is_first_rank():
        say(text, style="yellow")
