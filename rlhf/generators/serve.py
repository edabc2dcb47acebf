"""The process that owns a sampler: answers the trainer's questions, one after the other.

    python -m rlhf.generators.serve <number of a socket that was inherited> <pid of the trainer>

A question is a method of `Server` and its arguments, an answer what it returned or the error that it raised.
Only a `load` may come before the answer to a `sample` (`schedule.update=in_flight`): where it comes in time
it is answered with it, else after it. Pickle travels only over that socket, which no other process has. The
process ends with the trainer: at once where it waits for a question, within a second where it works on one.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlhf.batch import Prompts, Rollouts
from rlhf.errors import RunError, UserError
from rlhf.generators.generator import Sampling
from rlhf.generators.sampler import Sampler, SamplerFactory
from rlhf.generators.transfer import Manifest, remove


class Channel:
    """Python objects over a socket, both ways."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.file = sock.makefile("rwb")

    def send(self, message: Any) -> None:
        """Send, or raise OSError."""
        pickle.dump(message, self.file)
        self.file.flush()

    def receive(self) -> Any:
        """Wait for a message, or raise OSError, EOFError or UnpicklingError."""
        return pickle.load(self.file)

    def answers(self, within_s: float) -> bool:
        """Wait until a message begins to arrive, where all before have been received; False: none did."""
        return bool(select.select([self.socket], [], [], within_s)[0])

    def pending(self) -> bool:
        """Whether a message has begun to arrive, or is here already behind the one received last."""
        self.socket.setblocking(False)
        try:
            return bool(self.file.peek(1))  # looks at the socket only where nothing is here
        finally:
            self.socket.setblocking(True)

    def close(self) -> None:
        """The other side reads its end; what was not sent is forgotten."""
        with suppress(OSError):
            self.file.close()
        self.socket.close()


class Server:
    """What the trainer can ask for."""

    def __init__(self, trainer: int, channel: Channel) -> None:
        self.trainer = trainer
        self.channel = channel
        self.sampler: Sampler | None = None
        self.version: int | None = None  # of the weights that the sampler holds
        self.paths: set[str] = set()  # of the trainer's shared files

    def build(self, factory: SamplerFactory) -> None:
        """Make the sampler."""
        self.sampler = factory.build()

    def load(self, manifest: Manifest) -> tuple[int, dict[str, int]]:
        """Take weights over; returns their version and checksums, for the trainer to compare."""
        assert self.sampler is not None
        self.paths.add(manifest.path)
        self.version = None
        taken = self.sampler.load(manifest)
        self.version = manifest.version
        return manifest.version, taken

    def sample(
        self, prompts: Prompts, sampling: Sampling, in_flight: bool
    ) -> tuple[Rollouts, list[tuple[int, dict[str, int]]]]:
        """Answer prompts with the weights that the sampler holds, and say which and how long it took.

        In flight, weights that come meanwhile are taken over; returns also what `load` answered to each.
        """
        assert self.sampler is not None and self.version is not None, "weights come before requests"
        loads: list[tuple[int, dict[str, int]]] = []

        def update() -> int:
            while self.channel.pending():
                method, arguments = self.channel.receive()
                assert method == "load", "nothing else overtakes a request"
                loads.append(self.load(*arguments))
            assert self.version is not None
            return self.version

        start = time.perf_counter()
        rollouts = self.sampler.sample(prompts, sampling, update if in_flight else None)
        seconds = time.perf_counter() - start
        rollouts = replace(rollouts, version=self.version, generate_s=seconds)
        return replace(rollouts, version=min(rollouts.versions())), loads

    def close(self) -> None:
        """Release what the sampler holds."""
        if self.sampler is not None:
            self.sampler.close()

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """The answer to one question; an error that is none of the user's is shown whole in the log."""
        try:
            return getattr(self, method)(*arguments)
        except (UserError, RunError) as error:
            return error
        except Exception as error:
            traceback.print_exc()
            return RunError(
                f"the generator could not {method}: {type(error).__name__}: {error}; where it happened is in "
                "generator.log"
            )

    def end_with_trainer(self) -> None:
        """Wait for the trainer's end, then end this process and all that it started."""
        while os.getppid() == self.trainer:
            time.sleep(0.5)
        for path in self.paths:
            remove(path)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until the trainer says `close` or is gone."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    channel = Channel(sock)
    server = Server(int(sys.argv[2]), channel)
    threading.Thread(target=server.end_with_trainer, daemon=True).start()
    method = ""
    while method != "close":
        try:
            method, arguments = channel.receive()
        except EOFError:
            break
        channel.send(server.answer(method, arguments))


if __name__ == "__main__":
    main()
