"""One server of vLLM, as the pool of a run uses it: each call over HTTP has a time limit."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from rlhf.core.errors import RunError
from rlhf.core.formatting import shortened
from rlhf.generators.servers.protocol import ABORT, GENERATE, LOAD, PARENT, SCRATCH, STATUS
from rlhf.generators.weights import TransferError, confirm
from rlhf.processes.worker import ending, inherited, kill

if TYPE_CHECKING:
    from rlhf.generators.weights import Manifest, WeightStore

_CONNECT_S = 5.0
_BYTES_PER_S = 50e6  # at which a server reads weights at least
_POLL_S = 0.25  # between two looks at a server that starts
_WATCH_S = 0.5  # between two looks at the processes of a server
_PING_S = 5.0  # between two questions to a server
_LOG_LINES = 5  # of a server that did not start, in the error


class Gone(Exception):
    """An error: a server cannot be used until it has started again; the message is a predicate."""


class NoAnswer(Exception):
    """An error: a call got no valid answer; the server may be well. The message is a predicate."""


class Reply(NamedTuple):
    """A sampled response."""

    ids: list[int]
    logprobs: list[float]  # at the sampling temperature
    versions: list[int]  # of the weights that sampled each token
    ended: bool  # by itself, not because it was aborted


class Child:
    """The processes of a server on this machine, which are one process group.

    Args:
        command: returns the command of a server that listens on a port.
        environment: environment variables, in addition to those of the trainer without its rank.
        log: file for the output; None: the output of this process.
        host: the host in the address of the server.
        port: the port; 0: a free one at each start.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        environment: Mapping[str, str],
        log: Path | None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.command, self.environment, self.log = command, environment, log
        self.host, self.port = host, port
        self.process: subprocess.Popen[bytes] | None = None
        self.scratch: str | None = None  # folder for temporary files, which a killed process leaves behind

    def start(self) -> str:
        """Start the server, and return its address."""
        port = self.port or free_port()
        self.scratch = tempfile.mkdtemp(prefix=SCRATCH)
        with self.log.open("ab") if self.log else nullcontext() as log:
            self.process = subprocess.Popen(
                self.command(port),
                env=inherited(self.scratch) | {PARENT: str(os.getpid()), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        return f"http://{self.host}:{port}"

    def ended(self) -> str | None:
        """Return how the server ended; None: it runs."""
        running = self.process is None or self.process.poll() is None
        return None if running or self.process is None else ending(self.process)

    def stop(self) -> None:
        """Kill all processes of the server, and remove its temporary files."""
        if self.process is not None:
            kill(self.process)
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.process = self.scratch = None

    def output(self) -> str:
        """Return where the output is, and its end, for an error."""
        if self.log is None:
            return "its output is above"
        lines = []
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"its log is {self.log}: {' | '.join(filter(str.strip, lines))}"


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Server:
    """A server and what it does now. All methods are called in the thread of the pool.

    Args:
        name: in messages, such as "server 0".
        url: its address; None: `child` has it.
        key: the key of its routes; None: it has none.
        start_s: seconds until it must be ready.
        answer_s: seconds in which it must answer a call that is no request for tokens.
        request_s: seconds in which it must sample a response.
        child: its processes, if the run starts it.
        accept: raises an error if a server with this status cannot be used.
    """

    def __init__(
        self,
        name: str,
        url: str | None,
        key: str | None,
        start_s: float,
        answer_s: float,
        request_s: float,
        child: Child | None = None,
        accept: Callable[[Mapping[str, Any]], None] = lambda about: None,
    ) -> None:
        self.name, self.url, self.key, self.child, self.accept = name, url, key, child, accept
        self.start_s, self.answer_s, self.request_s = start_s, answer_s, request_s
        self.session: aiohttp.ClientSession | None = None
        self.about: dict[str, Any] = {}  # its status when it was ready; empty: it was never ready
        self.version: int | None = None  # of its weights, as it confirmed; None: random weights
        self.loading: Manifest | None = None
        self.running: dict[asyncio.Task[None], Any] = {}  # requests for tokens
        self.tokens = 0  # of these requests, at most
        self.broken: asyncio.Future[None] | None = None  # gets an error if it must be given up

    @property
    def slots(self) -> int:
        """The number of responses that it samples at a time."""
        return int(self.about["max_num_seqs"])

    async def start(self) -> None:
        """Start the server if the run does so, and wait until it is ready.

        Raises:
            Gone: it was not ready in time, or a signal ended it.
            RunError: it cannot start, or did not answer when the run began.
            UserError: it must not be used.
        """
        self.version = self.loading = None
        loop = asyncio.get_running_loop()
        if self.child is not None:
            self.url = self.child.start()
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # A connection for each call: a server closes idle ones, and those of a call that failed
        self.session = aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        until = loop.time() + self.start_s
        while True:
            try:
                self.about = await self.status(min(self.answer_s, self.start_s))
                return self.accept(self.about)
            except NoAnswer as error:
                if self.child is not None and (how := self.child.ended()):
                    if how.startswith("killed"):
                        raise Gone(f"died ({how})") from None
                    raise RunError(
                        f"{self.name} must start, but it ended ({how}); {self.child.output()}"
                    ) from None
                if loop.time() > until:
                    late = f"was not ready within the start limit, {self.start_s:g} s: it {error}"
                    if self.child is None and not self.about:
                        raise RunError(f"{self.name} {late}; start it, or correct generator.urls") from None
                    raise Gone(late) from None
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Cancel all requests, and end the processes of a server that the run started."""
        for task in self.running:
            task.cancel()
        if self.session is not None:
            await self.session.close()
        if self.child is not None:
            await asyncio.to_thread(self.child.stop)

    async def watch(self, is_asked: Callable[[], bool] = lambda: True) -> None:
        """Look whether the server still runs and answers.

        Args:
            is_asked: whether it must answer now.

        Raises:
            Gone: it does not.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.child is not None and (how := self.child.ended()):
                raise Gone(f"died ({how})")
            if is_asked() and loop.time() > asked + _PING_S:
                await self.check()
                asked = loop.time()

    async def check(self) -> None:
        """Ask the server for its state.

        Raises:
            Gone: it does not answer, or was started again by somebody else.
        """
        try:
            state = await self.status()
        except NoAnswer as error:
            raise Gone(str(error)) from None
        if state["start"] != self.about["start"]:
            raise Gone("was started again")

    def breaks(self, error: Exception) -> None:
        """Let the pool give the server up, because of an error of a request."""
        assert self.broken is not None
        if not self.broken.done():
            self.broken.set_exception(error)

    async def status(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the state of the server.

        Raises:
            NoAnswer: engine or workers did not answer in time.
            RunError: the server does not accept the key.
        """
        state = await self._call("GET", STATUS, None, limit_s or self.answer_s)
        if not {"start", "max_num_seqs"} <= state.keys():
            raise NoAnswer(f"answered {STATUS} without its state ({shortened(repr(state), 200)})")
        return state

    async def load(self, manifest: Manifest, link: WeightStore) -> None:
        """Load weights, which must be confirmed.

        Args:
            manifest: the weights.
            link: sends them to this server.

        Raises:
            Gone: the load failed, or version or checksums differ from what the trainer sent.
        """
        self.loading = manifest
        limit_s = self.answer_s + sum(entry.bytes for entry in manifest.entries) / _BYTES_PER_S
        offered = link.offer(manifest, lambda: None)  # the limit ends a call that gets no weights
        body = {
            "version": offered.version,
            "limit_s": limit_s,
            "group": offered.group,
            "update": offered.update or offered.described(),  # by NCCL, only the tensors are described
        }
        try:
            answer = await self._call("POST", LOAD, body, limit_s)
            confirm(manifest, answer["version"], dict(answer["checksums"]))
            await asyncio.to_thread(link.finish, manifest)
        except (NoAnswer, KeyError, TypeError, ValueError, TransferError) as error:
            cause: Exception = error
            try:
                link.check()
            except RunError as unsent:
                cause = unsent
            raise Gone(f"did not load version {manifest.version} ({cause})") from None
        self.version, self.loading = manifest.version, None

    async def generate(self, name: str, ids: Sequence[int], parameters: Mapping[str, Any]) -> Reply:
        """Sample one response, which `abort` ends early by its name.

        Raises:
            NoAnswer: there is no valid response.
        """
        body = {"request_id": name, "token_ids": ids, "sampling_params": parameters}
        answer = await self._call("POST", GENERATE, body, self.request_s)
        try:
            (choice,) = answer["choices"]
            content, found = choice["logprobs"]["content"], choice["token_ids"]
            logprobs = [float(token["logprob"]) for token in content]
            versions = [
                int(span["version"])
                for span in choice["weight_versions"]
                for _ in range(span["start"], span["end"])
            ]
            ended = choice["finish_reason"] in ("length", "stop")
            complete = (
                (ended or choice["finish_reason"] == "abort")
                and ended <= len(found) <= parameters["max_tokens"]
                and found == [token["token_id"] for token in content]
                and len(found) == len(versions)
                and all(map(math.isfinite, logprobs))
            )
        except (KeyError, TypeError, ValueError):
            complete = False
        if not complete:
            raise NoAnswer(f"answered with an incomplete response ({shortened(repr(answer), 200)})")
        return Reply(found, logprobs, versions, ended)

    async def abort(self, name: str) -> None:
        """End a response early; `generate` returns it. An error shows in its answer."""
        with suppress(NoAnswer):
            await self._call("POST", ABORT, {"request_ids": [f"generate-tokens-{name}"]}, self.answer_s)

    async def _call(self, method: str, path: str, body: Any, limit_s: float) -> dict[str, Any]:
        assert self.session is not None
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        try:
            async with self.session.request(
                method, f"{self.url}{path}", json=body, timeout=limit, allow_redirects=False
            ) as answer:
                content, status = await answer.read(), answer.status
        except TimeoutError:
            raise NoAnswer(f"did not answer {path} within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"did not answer {path} ({type(error).__name__}: {error})") from None
        if status in (401, 403):
            raise RunError(
                f"{self.name} must accept the key of this run, got status {status}; set "
                "generator.key_variable=<environment variable with the key of the servers>"
            )
        with suppress(ValueError):
            found = json.loads(content)
            if status == 200 and isinstance(found, dict):
                return found
        text = shortened(repr(content.decode(errors="replace")), 300)
        raise NoAnswer(f"answered {path} with status {status} ({text})")
