"""A server with the routes of a vLLM server of a run, in a thread, that misbehaves on request.

Its tokens are determined by the weights, the prompt and the seed, so the tokens of two servers with the same
weights are equal, and tokens that other weights sampled are different.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from aiohttp import web

from rlhf.core.errors import RunError
from rlhf.generators.servers.process import ABORT, GENERATE, LOAD, STATUS
from rlhf.generators.weights import Entry, Manifest, checksum, fingerprint, read
from tests.generators.test_gpu_transfer import Peer

VOCABULARY, STOP = 97, 1
UPDATE = ("names", "dtype_names", "shapes")
STARTS = count(1)
Fault = Callable[["FakeServer", web.Request, dict[str, Any]], Any]


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield the event loop of a thread, in which servers run."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(cancel_others(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def cancel_others() -> None:
    """Cancel all tasks of the event loop besides this one."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class FakeServer:
    """A server, in the event loop of another thread; `faults` are what its next answers are.

    Args:
        loop: the event loop.
        key: the key that the routes ask for; None: no key.
        slots: the number of responses at a time.
        step_s: seconds for each token.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, key: str | None = None, slots: int = 4, step_s: float = 0.0
    ) -> None:
        self.loop, self.key, self.slots, self.step_s = loop, key, slots, step_s
        self.faults: dict[str, list[Fault | None]] = {GENERATE: [], LOAD: [], STATUS: [], ABORT: []}
        self.always: dict[str, Fault] = {}  # faults without end, by route
        self.calls: Counter[str] = Counter()
        self.running: dict[int, int] = {}  # the most tokens of each open request for tokens
        self.loads: list[int] = []  # versions
        self.aborted: set[str] = set()  # names of requests for tokens
        self.runner: web.AppRunner | None = None
        self.comes_back = False  # whether somebody starts the server again after it has ended
        self.place = socket.socket()  # keeps the port while the server does not run
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.place.bind(("127.0.0.1", 0))
        self.task: asyncio.Task[None] | None = None
        self.open: list[web.Request] = []
        self.peer: Peer | None = None  # in the group of a trainer
        self.groups = 0  # that were joined
        self.transfers: list[Callable[[FakeServer], None] | None] = []  # faults of the next tensors

    @property
    def url(self) -> str:
        """The address, which stays the same after a restart."""
        return f"http://127.0.0.1:{self.place.getsockname()[1]}"

    def start(self) -> str:
        """Start with random weights, and return the address."""
        return asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)

    def kill(self) -> None:
        """End as after a signal: open connections break, and new ones are refused."""
        asyncio.run_coroutine_threadsafe(self.ends(), self.loop).result(10)

    async def _start(self) -> str:
        self.weights: dict[str, int] = {}  # checksums of the weights; none: random weights
        self.version, self.start_id, self.lock = "default", f"start {next(STARTS)}", asyncio.Lock()
        app = web.Application()
        for method, route, answer in (
            ("GET", STATUS, self.status),
            ("POST", LOAD, self.load),
            ("POST", GENERATE, self.generate),
            ("POST", ABORT, self.abort),
        ):
            app.router.add_route(method, route, self.handler(route, answer))
        self.runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, *self.place.getsockname(), reuse_port=True)
        await site.start()
        return self.url

    async def dies(self, after_s: float = 0.0) -> None:
        """End, in the event loop; if it comes back, it has random weights then."""
        runner = self.runner
        await asyncio.sleep(after_s)
        if runner is not self.runner:
            return
        await self.ends()
        if self.comes_back:
            await self._start()

    async def ends(self) -> None:
        runner, self.runner = self.runner, None
        if self.peer is not None:
            self.peer.destroy()
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            for request in self.open:
                if request.transport is not None:
                    request.transport.abort()
            self.running = {}
            await runner.cleanup()

    def handler(self, route: str, answer: Callable[[dict[str, Any]], Any]) -> Any:
        """Return the handler of a route: the key, then a fault, then the answer."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.calls[route] += 1
            self.open = [each for each in (*self.open, request) if each.transport is not None]
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            body = await request.json() if request.can_read_body else {}
            own = self.faults[route]
            fault = own.pop(0) if own else self.always.get(route)
            if fault is not None and (found := await fault(self, request, body)) is not None:
                return found
            return web.json_response(await answer(body))

        return handle

    # -- the answers of a server that is well -------------------------------------------------------

    async def status(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the state."""
        return {"start": self.start_id, "version": self.version, "max_num_seqs": self.slots}

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Read a file, and use its weights."""
        async with self.lock:
            self.loads.append(body["version"])
            update = body["update"]
            try:
                if body["group"] is not None:
                    self.peer = await asyncio.to_thread(self.join, body["group"])
                if "path" in update:
                    entries = tuple(Entry(*each) for each in update["entries"])
                    found = read(Manifest(update["version"], update["path"], entries))
                    sums = {name: checksum(tensor) for name, tensor in found}
                else:
                    sums = await asyncio.to_thread(self.receive, update)
            except (RunError, OSError) as error:
                self.task = self.loop.create_task(self.dies(after_s=0.02))
                raise web.HTTPInternalServerError(text=str(error)) from error
            self.weights, self.version = sums, str(body["version"])
            return {"version": body["version"], "checksums": sums}

    def join(self, group: dict[str, Any]) -> Peer:
        """Join the group of a trainer, in another thread."""
        self.groups += 1
        return Peer(socket.create_connection(("127.0.0.1", group["port"])))

    def receive(self, update: dict[str, Any]) -> dict[str, int]:
        """Receive tensors from the trainer, in another thread; return their fingerprints."""
        assert self.peer is not None
        found = {}
        for name, dtype, shape in zip(*(update[each] for each in UPDATE), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            data = bytearray(self.peer.receive(tensor.nbytes))
            tensor = torch.frombuffer(data, dtype=tensor.dtype).view(shape)
            if self.transfers and (fault := self.transfers.pop(0)) is not None:
                fault(self)
            found[name] = int(fingerprint(tensor)) % 2**64
            self.peer.send(b"taken")
        return found

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample a response, a token at a time with the weights of that time."""
        parameters, ids, versions = body["sampling_params"], [], []
        assert max(body["token_ids"]) < VOCABULARY, "such an id ends a real server"
        number = self.calls[GENERATE]
        self.running[number] = len(body["token_ids"]) + parameters["max_tokens"]
        try:
            while len(ids) < parameters["max_tokens"] and STOP not in ids and not self.ends_early(body):
                if self.step_s:
                    await asyncio.sleep(self.step_s)
                async with self.lock:
                    ids.append(token(self.weights, body["token_ids"], parameters["seed"], len(ids)))
                    versions.append(self.version)
        finally:
            self.running.pop(number, None)
        reason = "abort" if self.ends_early(body) else "stop" if STOP in ids else "length"
        self.aborted.discard(f"generate-tokens-{body['request_id']}")
        return {
            "choices": [
                {
                    "token_ids": ids,
                    "finish_reason": reason,
                    "logprobs": {"content": [{"token_id": each, "logprob": -each / 100} for each in ids]},
                    "weight_versions": [
                        {"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)
                    ],
                }
            ]
        }

    def ends_early(self, body: dict[str, Any]) -> bool:
        """Return whether a request for tokens was aborted."""
        return f"generate-tokens-{body['request_id']}" in self.aborted

    async def abort(self, body: dict[str, Any]) -> dict[str, Any]:
        """End requests for tokens early."""
        self.aborted.update(body["request_ids"])
        return {}


def token(weights: dict[str, int], ids: list[int], seed: int, i: int) -> int:
    """Return token `i` of a response."""
    return Random(f"{sorted(weights.items())} {ids} {seed} {i}").randrange(1, VOCABULARY)


class FakeChild:
    """A fake server in place of the processes of `rlhf.processes.servers.Child`."""

    log = Path("server.log")

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.start = fake.start

    def ended(self) -> str | None:
        """Return how the server ended; None: it runs."""
        return "killed by SIGKILL" if self.fake.runner is None else None

    def stop(self) -> None:
        """Kill the server."""
        self.fake.kill()

    def output(self) -> str:
        """Return the end of the log."""
        return "the last line"


# -- faults ----------------------------------------------------------------------------------------


def says(status: int = 200, text: str = "") -> Fault:
    """Return a fault: the server answers with a status and a text."""

    async def fault(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text=text)

    return fault


def changes(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """Return a fault: the server changes its answer before it gives it."""

    async def fault(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
        answers = {GENERATE: fake.generate, LOAD: fake.load, STATUS: fake.status}
        answer = await answers[request.path](body)
        change(answer)
        return web.json_response(answer)

    return fault


async def hangs(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
    """Do not answer."""
    await asyncio.sleep(60)


async def drips(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer without end, some bytes at a time."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def resets(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Break the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def truncates(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Break the connection in the middle of an answer."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    await asyncio.sleep(0.01)
    assert request.transport is not None
    request.transport.abort()
    return response


async def answers_too_late(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Do what was asked, and break the connection then."""
    await {GENERATE: fake.generate, LOAD: fake.load, STATUS: fake.status}[request.path](body)
    return await resets(fake, request, body)


async def redirects(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Answer that another address has the answer."""
    return web.Response(status=307, headers={"Location": f"{fake.url}/elsewhere"})


async def is_slow(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
    """Answer late, but within the limit."""
    await asyncio.sleep(0.1)


async def dies(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
    """End without an answer, as after kill -9."""
    fake.task = fake.loop.create_task(fake.dies())  # which cancels this handler
    await asyncio.sleep(60)


async def is_started_again(fake: FakeServer, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Have random weights and another number of the start, as after a restart that nobody noticed."""
    fake.start_id, fake.version, fake.weights = f"start {next(STARTS)}", "default", {}
    return web.Response(status=503)
