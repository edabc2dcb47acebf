"""Main program of a worker process: it answers the requests of its trainer one after the other.

    TMPDIR=<own folder> python -m rlhf.processes.service <name> <inherited socket fd> <pid of the trainer>

The first request is `build`, with the factory of the service. Every other request is the name of a method of
the service and its arguments. The answer is the returned value, or the error that the method raised. Messages
are pickled, which is safe because only trainer and worker process have the socket. When the trainer ends, the
worker process removes its temporary folder and ends within a second, even while it answers a request. The
trainer's side is in `rlhf.processes.worker`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Protocol

from rlhf.core.errors import OutOfMemory, RunError, UserError
from rlhf.processes.signals import SIGNALS, end_group, ignore

_LENGTH = struct.Struct("<Q")  # header of a message: its number of bytes
_PIECE = 1 << 20  # maximum number of bytes read at once
_POLL_S = 0.1  # seconds between checks whether the trainer has ended


class _Disconnected(EOFError):
    """An error: the other side closed the connection or ended."""


class Channel:
    """A connection that sends and receives Python objects over a socket.

    While `send` writes, it also reads the bytes that arrive. So two sides do not deadlock if both send more
    than the socket buffers, for example an answer and a load of weights at the same time. A method raises
    TimeoutError if the time limit of the socket is exceeded.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.inbox = bytearray()  # bytes that have arrived and were not yet returned by `receive`

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
        """
        data = pickle.dumps(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        reading = [self.socket]
        while left:
            arrived, free, _ = select.select(reading, [self.socket], [], self.socket.gettimeout())
            if not arrived and not free:
                raise TimeoutError
            if arrived and not self.take():
                reading = []  # the other side stopped sending; `socket.send` fails if the socket is closed
            if free:
                try:
                    left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
                except ConnectionError:
                    raise _Disconnected from None

    def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
            UnpicklingError: the message is damaged.
        """
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        return pickle.loads(self.read(length))

    def answers(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for a message; return whether its first bytes have arrived."""
        return bool(self.inbox or select.select([self.socket], [], [], within_s)[0])

    def pending(self) -> bool:
        """Return whether the first bytes of the next message have arrived, without waiting."""
        if not self.inbox and self.answers(0):
            self.take()
        return bool(self.inbox)

    def read(self, count: int) -> bytes:
        """Wait for `count` bytes and return them.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
        """
        while len(self.inbox) < count:
            if not self.take():
                raise _Disconnected
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        return data

    def take(self) -> bool:
        """Wait for bytes and add them to the inbox; return False if the other side closed the connection."""
        try:
            data = self.socket.recv(_PIECE)
        except ConnectionError:
            return False
        self.inbox += data
        return bool(data)

    def shut(self) -> None:
        """Shut down the connection, so that a thread that waits on either side gets EOFError."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the other side gets EOFError."""
        self.socket.close()


class Service:
    """An object in a worker process whose methods the trainer calls."""

    def close(self) -> None:
        """Release resources when the trainer no longer needs the service; by default, do nothing."""

    def orphaned(self) -> None:
        """Remove resources that outlive the process, because the trainer has ended; by default, do nothing.

        This method is called in another thread than the other methods.
        """


class ServiceFactory(Protocol):
    """A factory that creates a service in the worker process.

    The factory is pickled and sent to the process. So it is a dataclass of plain values, and only `build`
    imports what the service needs.
    """

    def build(self, channel: Channel) -> Service:
        """Create the service.

        Args:
            channel: the connection to the trainer; the service may read from it during a request.

        Raises:
            UserError, RunError: no service can be created with the values of the factory; the run ends.
        """


class Server:
    """The request handler of a worker process.

    Args:
        name: name of the process in messages; its log is `<name>.log`.
        trainer: process id of the trainer.
        channel: connection to the trainer.
    """

    def __init__(self, name: str, trainer: int, channel: Channel) -> None:
        self.name, self.trainer, self.channel = name, trainer, channel
        self.service: Service | None = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the answer to one request: the result, or the error.

        The traceback of an unexpected error is written to the log of the process.

        Raises:
            Disconnected: the trainer ended while the service read from the connection.
        """
        try:
            if method == "build":
                self.service = arguments[0].build(self.channel)
                return None
            return getattr(self.service, method)(*arguments)
        except _Disconnected:
            raise
        except (UserError, RunError) as error:
            return error
        except Exception as error:
            traceback.print_exc()
            kind = type(error).__name__
            text = f"the {self.name} failed to {method}: {kind}: {error}; the traceback is in {self.name}.log"
            if kind != "OutOfMemoryError":  # of torch, which this module does not import
                return RunError(text)
            full = OutOfMemory(text)
            full.process = self.name
            return full

    def end_with_trainer(self) -> None:
        """Wait until the trainer has ended, then remove temporary files and kill the whole process group."""
        while os.getppid() == self.trainer:
            time.sleep(_POLL_S)
        if self.service is not None:
            self.service.orphaned()
        end_group()


def main() -> None:
    """Answer requests until the trainer requests `close` or ends.

    The process ignores the signals that stop a run. A launcher may send them to every process of a run, but
    the trainer decides when the worker process ends.
    """
    for number in SIGNALS:
        signal.signal(number, ignore)
        signal.siginterrupt(number, False)  # system calls continue
    name, descriptor, trainer = sys.argv[1:]
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)
    channel = Channel(sock)
    server = Server(name, int(trainer), channel)
    watcher = threading.Thread(target=server.end_with_trainer, daemon=True)
    watcher.start()
    method = ""
    while method != "close":
        try:
            method, arguments = channel.receive()
            channel.send(server.answer(method, arguments))
        except _Disconnected:  # the trainer has ended, or will kill this process
            watcher.join()


if __name__ == "__main__":
    main()
