"""A process that serves its trainer: answers one question after the other, and ends with it.

    python -m rlhf.processes.service <name> <number of an inherited socket> <pid of the trainer> <temporary folder>

The first question is `build`, with what makes the service; every other is a method of the service and its
arguments, an answer what it returned or the error that it raised. Pickle travels only over that socket, which
no other process has. The process ends with the trainer: at once where it waits for a question, within a
second where it works on one. `rlhf/worker.py` is the trainer's side.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Protocol

from rlhf.core.errors import RunError, UserError
from rlhf.processes.signals import SIGNALS

LENGTH = struct.Struct("<Q")  # of a message, before it


PIECE = 1 << 20  # bytes taken in at once


class Channel:
    """Python objects over a socket, both ways.

    Who sends takes in meanwhile what arrives: two that send one another more than the socket holds, an
    answer and weights that overtake it, do not wait for each other. A limit of the socket is a TimeoutError.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.inbox = bytearray()  # what has arrived, and was not received yet

    def send(self, message: Any) -> None:
        """Send, or raise OSError."""
        data = pickle.dumps(message)
        left = memoryview(LENGTH.pack(len(data)) + data)
        reading = [self.socket]
        while left:
            arrived, free, _ = select.select(reading, [self.socket], [], self.socket.gettimeout())
            if not arrived and not free:
                raise TimeoutError
            if arrived and not self.take():
                reading = []  # the other side's end; sending says whether it still listens
            if free:
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]

    def receive(self) -> Any:
        """Wait for a message, or raise OSError, EOFError or UnpicklingError."""
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        return pickle.loads(self.read(length))

    def answers(self, within_s: float) -> bool:
        """Wait until a message begins to arrive, where all before have been received; False: none did."""
        return bool(self.inbox or select.select([self.socket], [], [], within_s)[0])

    def pending(self) -> bool:
        """Whether a message has begun to arrive, or is here already behind the one received last."""
        if not self.inbox and self.answers(0):
            self.take()
        return bool(self.inbox)

    def read(self, count: int) -> bytes:
        """Wait for as many bytes."""
        while len(self.inbox) < count:
            if not self.take():
                raise EOFError
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        return data

    def take(self) -> bool:
        """Wait for what arrives next; False: the other side has ended."""
        data = self.socket.recv(PIECE)
        self.inbox += data
        return bool(data)

    def shut(self) -> None:
        """Have whoever waits here, in another thread too, find the other side's end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The other side reads its end."""
        self.socket.close()


class Service:
    """What a process does for its trainer: any other method than these is what it can be asked for."""

    def close(self) -> None:
        """The trainer is done: release what is held; here nothing."""

    def orphaned(self) -> None:
        """The trainer is gone: remove what would outlive both, from another thread; here nothing."""


class ServiceFactory(Protocol):
    """Makes a service in the process where it is to live. Goes there through pickle, so it is a dataclass of
    plain values, and `build` alone imports what the service needs.
    """

    def build(self, channel: Channel) -> Service:
        """Make the service, which may read from `channel` while it answers.

        Settings that cannot work raise UserError or RunError, which end the run.
        """


class Server:
    """Answers the trainer's questions.

    Args:
        name: of the process, in what it says; its log is `<name>.log`.
        trainer: pid.
        channel: to the trainer.
        scratch: the temporary folder of this process, which goes with it.
    """

    def __init__(self, name: str, trainer: int, channel: Channel, scratch: str) -> None:
        self.name = name
        self.trainer = trainer
        self.channel = channel
        self.scratch = scratch
        self.service: Service | None = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """The answer to one question; an error that is none of the user's is shown whole in the log."""
        try:
            if method == "build":
                return self.build(*arguments)
            return getattr(self.service, method)(*arguments)
        except (UserError, RunError) as error:
            return error
        except Exception as error:
            traceback.print_exc()
            return RunError(
                f"the {self.name} could not {method}: {type(error).__name__}: {error}; where it happened is "
                f"in {self.name}.log"
            )

    def build(self, factory: ServiceFactory) -> None:
        """Make the service."""
        self.service = factory.build(self.channel)

    def end_with_trainer(self) -> None:
        """Wait for the trainer's end, then end this process and all that it started."""
        while os.getppid() == self.trainer:
            time.sleep(0.5)
        if self.service is not None:
            self.service.orphaned()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until the trainer says `close` or is gone.

    What asks a run to stop may be sent to every process of it; it is the trainer's to say when this one ends.
    """
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    name, number, trainer, scratch = sys.argv[1:]
    sock = socket.socket(fileno=int(number))
    sock.set_inheritable(False)
    channel = Channel(sock)
    server = Server(name, int(trainer), channel, scratch)
    watcher = threading.Thread(target=server.end_with_trainer, daemon=True)
    watcher.start()
    method = ""
    while method != "close":
        try:
            method, arguments = channel.receive()
        except EOFError:  # the trainer is gone, or about to end this process
            watcher.join()
        channel.send(server.answer(method, arguments))


if __name__ == "__main__":
    main()
