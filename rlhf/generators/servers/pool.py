"""A pool of servers of vLLM, which answer the requests of a run one response at a time.

    trainer's thread            thread of the pool                         server
    submit(prompts) ──▶ queue ──▶ a response at a time ── generate ──▶ tokens, log-probs, versions
    load(weights)   ──▶ file  ──▶ each server, at its time ── load ──▶ checksums

A response has its own random numbers, so it does not matter which server samples it: the one with the fewest
outstanding tokens gets it. If a server is lost, its requests go to the next one and get the same tokens.

Between updates (`schedule.update=between`), a request needs the version of the weights that were loaded last
before it. A server loads another version only when it samples nothing and nothing waits for its version, so
a server may be ahead of another. With in-flight updates a server loads new weights at once; its running
responses go on with them, and requests of other servers are not delayed. An evaluation needs one version.

Every call has a time limit. A server that does not answer, answers wrongly or fails to load is given up: its
processes are killed and started again, or, if the run did not start it, it is asked until it is ready again.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_urlsafe
from typing import Any

import torch
from torch import Tensor

from rlhf.config.generators import Transfer, VLLMServerConfig, most_versions
from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError, UserError
from rlhf.core.metrics import How, Metrics, Stat
from rlhf.environments.episodes import Episodes
from rlhf.generators.generator import Generator, GeneratorContext, settle
from rlhf.generators.process import annotated
from rlhf.generators.servers.server import Gone, NoAnswer, Reply, Server, check, command, variables
from rlhf.generators.vllm.generator import build_store, factory, place, route, variables_of
from rlhf.generators.vllm.sampler import VLLMFactory, rollouts_of, sampling_parameters
from rlhf.generators.weights import Manifest, SharedWeights, WeightStore
from rlhf.processes.servers import Child
from rlhf.terminal.console import say

_ABORT_S = 0.2  # between two requests to end a response
_SUMS = ("generator/restarts", "generator/requeued", "time/load_s")  # metrics


class ServerPool(Generator):
    """A generator whose responses are sampled by servers.

    Args:
        servers: the servers.
        store: keeps the versions of the weights where the servers can read them.
        settings: what the servers sample with.
        vocabulary: the number of token ids of the model.
        restarts: times that servers may be lost, and tries of a response besides the first.
        in_flight: whether weights change while a response is sampled.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        store: WeightStore,
        settings: VLLMFactory,
        *,
        vocabulary: int,
        restarts: int,
        in_flight: bool,
    ) -> None:
        self.servers, self.store, self.settings = servers, store, settings
        self.vocabulary, self.most_restarts, self.in_flight = vocabulary, restarts, in_flight
        self.failure: Exception | None = None
        self.version: int | None = None  # of the last load; the trainer's thread sets it
        self.sums = dict.fromkeys(_SUMS, 0.0)  # since the last call of `figures`
        self.numbers = count()  # of responses
        self.requests: dict[Future[Rollouts], _Request] = {}  # that have no answer yet
        # In the thread of the pool:
        self.restarts = 0  # of the session
        self.queue: deque[_Work] = deque()
        self.held = Counter[int]()  # open requests with episodes, by their version
        self.up: list[Server] = []  # servers that are ready
        self.manifests: dict[int, Manifest] = {}  # of the kept versions
        self.loop = asyncio.new_event_loop()
        self.changed = self.loop.create_future()  # done at the next change of the queue or the weights
        self.tell: Callable[[], None] = lambda: None  # called when `oldest` may have changed
        self.aborts: set[asyncio.Task[None]] = set()
        self.main: asyncio.Task[None] | None = None
        self.thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self.thread.start()

    # -- the trainer's thread ----------------------------------------------------------------------

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt, without waiting for them.

        Raises:
            RunError: the servers have failed.
        """
        self.raise_failure()
        assert self.version is not None, "load weights before the first request"
        version = None if self.in_flight and sampling.purpose == "train" else self.version
        kind = _Request if self.settings.environment is None else _Conversation
        request = kind(self, prompts, sampling, version)
        self.requests[request.answer] = request
        request.answer.add_done_callback(self.requests.pop)
        request.begin()
        return request.answer

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the weights for the servers, without waiting for their loads.

        Raises:
            RunError: the servers have failed, or the weights cannot be written.
        """
        self.wait()
        manifest = self.store.write(weights, version)
        self.version = version

        def offer() -> None:
            self.manifests[version] = manifest
            self._change()

        self._call(offer)

    def wait(self) -> None:
        """Wait until the store keeps few enough versions.

        Raises:
            RunError: the servers have failed.
        """
        self.raise_failure()
        self.store.wait(most_versions(len(self.servers), self.in_flight), self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of the servers, if they have failed."""
        if self.failure is not None:
            raise self.failure

    @property
    def slots(self) -> int:
        """The number of responses that all servers sample at a time."""
        return len(self.servers) * self.settings.max_num_seqs

    @property
    def oldest(self) -> int:
        """The oldest version that a server has; one that starts will load the newest."""
        assert self.version is not None, "load weights before the first request"
        return min([self.version, *(each.version for each in self.up if each.version is not None)])

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Call a function in the thread of the pool whenever `oldest` may have changed."""
        self.tell = call

    def cut(self, answer: Future[Rollouts]) -> None:
        """End a single response with the tokens that it has, at least one."""
        self._call(self._cut, answer)

    def figures(self) -> Metrics:
        """Return restarts, requests that were sent again, and seconds of loads since the last call."""
        sums, self.sums = self.sums, dict.fromkeys(_SUMS, 0.0)
        return {name: Stat(value, 1.0, How.sum) for name, value in sums.items()}

    def close(self) -> None:
        """End all requests, the servers that the run started, and remove the weights."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(lambda: self.main and self.main.cancel())
        self.thread.join()
        self.store.close()

    def ask(self, works: Sequence[_Work]) -> None:
        """Queue responses, from any thread.

        Raises:
            RunError: the servers have failed, so nobody may look at the queue any more.
        """

        def queue() -> None:
            if self.failure is not None:
                for work in works:
                    work.done(self.failure)
            else:
                self.queue += works
                self._change()

        self._call(queue)
        self.raise_failure()

    def hold(self, version: int | None, more: int) -> None:
        """Count the open requests whose later replies need the same version, from any thread."""

        def hold(version: int) -> None:
            self.held[version] += more
            self.held = +self.held  # without zeros
            self._change()

        if version is not None:
            self._call(hold, version)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, with a failure or by `close`
            self.loop.call_soon_threadsafe(function, *arguments)

    # -- the thread of the pool --------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.main = self.loop.create_task(self._attend_all())
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self.main)
            for task in (left := asyncio.all_tasks(self.loop)):
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    async def _attend_all(self) -> None:
        """Attend all servers until one fails for good, or until the pool is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(self._attend(server))
        except* (RunError, UserError) as errors:
            self._fail(errors.exceptions[0])
        except* Exception as errors:
            error = RunError(f"the servers cannot be used: {errors.exceptions[0]!r}")
            error.__cause__ = errors.exceptions[0]
            self._fail(error)
        finally:
            self._fail(RunError("the servers were closed"))

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        works = [*self.queue, *(work for server in self.servers for work in server.running.values())]
        self.queue.clear()
        for work in works:
            work.done(self.failure)

    async def _attend(self, server: Server) -> None:
        """Start a server, use it, and start it again whenever it is lost."""
        while True:
            link = self.store.link()
            try:
                await server.start()
                self.up.append(server)
                await self._use(server, link)
            except Gone as error:
                self._lose(server, error)
            finally:
                threading.Thread(target=link.forget, daemon=True).start()  # it may take long
                await asyncio.shield(server.stop())

    async def _use(self, server: Server, link: WeightStore) -> None:
        """Let a server load weights and sample until it is lost.

        Raises:
            Gone: it is lost.
            RunError: it refuses the key, or a response failed too often.
        """
        server.broken = self.loop.create_future()
        watch = self.loop.create_task(server.watch(lambda: bool(server.running) and not server.loading))
        try:
            while True:
                while (manifest := self._next(server)) is not None:
                    start = time.perf_counter()
                    await server.load(manifest, link)
                    self.sums["time/load_s"] += time.perf_counter() - start
                    self._change()
                    self.tell()
                await asyncio.wait([watch, server.broken, self.changed], return_when=asyncio.FIRST_COMPLETED)
                for each in (watch, server.broken):
                    if each.done():
                        each.result()
        finally:
            watch.cancel()

    def _lose(self, server: Server, error: Gone) -> None:
        """Put the requests of a lost server back into the queue.

        Raises:
            RunError: servers were lost too often.
        """
        if server in self.up:
            self.up.remove(server)
        works = sorted([*server.running.values(), *self.queue], key=lambda work: work.number)
        lost, server.loading = len(server.running), None
        for task in server.running:
            task.cancel()
        server.running, server.tokens, self.queue = {}, 0, deque(works)
        self.restarts += 1
        self.sums["generator/restarts"] += 1
        self.sums["generator/requeued"] += lost
        if self.restarts > self.most_restarts:
            log = f"; {server.child.output()}" if server.child else ""
            raise RunError(
                f"servers may be lost at most {self.most_restarts} times (generator.restarts), but "
                f"{server.name} at {server.url} {error}{log}"
            )
        say(f"{server.name} {error}; starting it again, and asking others for its {lost} responses")
        self._change()
        self.tell()

    def _cut(self, answer: Future[Rollouts]) -> None:
        if (request := self.requests.get(answer)) is None:
            return
        request.is_cut = True
        for server in self.servers:
            for task, work in server.running.items():
                if work.request is request:
                    self.aborts.add(abort := self.loop.create_task(self._abort(server, task, work)))
                    abort.add_done_callback(self.aborts.discard)

    async def _abort(self, server: Server, task: asyncio.Task[None], work: _Work) -> None:
        """End a response that a server samples; it may not have the request yet."""
        while task in server.running:
            await server.abort(str(work.number))
            await asyncio.sleep(_ABORT_S)

    def _change(self) -> None:
        """Send responses to servers, and wake the tasks that wait for a change."""
        self._release()
        self._dispatch()
        if not self.changed.done():
            self.changed.set_result(None)
        self.changed = self.loop.create_future()

    def _next(self, server: Server) -> Manifest | None:
        """Return the weights that a server loads now, if any."""
        if not self.manifests or any(work.version is not None for work in server.running.values()):
            return None
        needed = {work.version for work in self.queue if work.version is not None}.union(self.held)
        if server.version in needed:
            return None
        version = min(needed, default=max(self.manifests))
        return None if version == server.version else self.manifests[version]

    def _release(self) -> None:
        """Let the store forget the versions that no server needs any more."""
        if len(self.manifests) < 2:
            return
        works = [*self.queue, *(work for server in self.servers for work in server.running.values())]
        needed = {work.version for work in works} | {max(self.manifests), *self.held}
        needed |= {server.loading.version for server in self.servers if server.loading}
        for version in self.manifests.keys() - needed:
            self.store.release(self.manifests.pop(version))

    def _dispatch(self) -> None:
        """Send queued responses to servers that have their version and a free slot."""
        waiting: deque[_Work] = deque()
        able = [each for each in self.up if each.version is not None and each.loading is None]
        while self.queue and (able := [each for each in able if len(each.running) < each.slots]):
            work = self.queue.popleft()
            if work.request.is_cut:  # its tokens were lost, or there were none
                work.parameters["max_tokens"] = 1
            if fit := [each for each in able if work.version in (None, each.version)]:
                server = min(fit, key=lambda each: each.tokens)
                server.tokens += work.tokens
                work.request.began = min(work.request.began, time.perf_counter())
                server.running[self.loop.create_task(self._sample(server, work))] = work
            else:
                waiting.append(work)
        self.queue = waiting + self.queue

    async def _sample(self, server: Server, work: _Work) -> None:
        """Let a server sample a response, and deliver it."""
        task, before = asyncio.current_task(), server.version
        assert task is not None and before is not None
        try:
            reply = await server.generate(str(work.number), work.ids, work.parameters)
            if not reply.ended and not work.request.is_cut:
                raise NoAnswer("ended a response that has no end")
            known = [before] if work.version is not None else range(before, max(self.manifests) + 1)
            if not set(reply.versions) <= {*known}:
                raise Gone(f"sampled tokens with version {', '.join(map(str, {*reply.versions} - {*known}))}")
        except NoAnswer as error:
            try:
                await server.check()
            except (Gone, RunError) as gone:
                return server.breaks(gone)
            work.lost += 1
            if work.lost > self.most_restarts:
                return server.breaks(
                    RunError(
                        f"{server.name} at {server.url} must answer a request within {work.lost} tries "
                        f"(generator.restarts), but it {error}"
                    )
                )
            self.sums["generator/requeued"] += 1
            self.queue.appendleft(work)
        except Exception as error:
            return server.breaks(error)
        else:
            if reply.ids:
                work.done(reply)
            else:  # it was cut before its first token
                self.queue.appendleft(work)
        del server.running[task]
        server.tokens -= work.tokens
        self._change()


# Requests to a pool of servers: responses, or episodes that environments answer.


_LOOK_S = 0.02  # between two looks at answers of environments


@dataclass(slots=True, eq=False)
class _Work:
    """A response to sample."""

    number: int  # in the order in which they were asked for
    request: _Request
    place: int  # in the request
    ids: list[int]
    parameters: dict[str, Any]
    lost: int = 0  # times that a server did not answer

    @property
    def version(self) -> int | None:
        """The version of the weights that must sample it; None: any."""
        return self.request.version

    def done(self, reply: Reply | Exception) -> None:
        """Give the reply to the request."""
        self.request.take(self.place, reply)

    @property
    def tokens(self) -> int:
        """The tokens that a server has to process, at most."""
        return len(self.ids) + int(self.parameters["max_tokens"])


class _Request:
    """A request of the trainer, whose answer is a future: one reply for each sample.

    Args:
        pool: samples the responses.
        prompts: N prompts.
        sampling: K, T and the temperature; single responses (`begun`) have K = 1.
        version: of the weights that must sample them; None: any.
    """

    def __init__(self, pool: ServerPool, prompts: Prompts, sampling: Sampling, version: int | None) -> None:
        self.pool, self.prompts, self.sampling, self.version = pool, prompts, sampling, version
        self.answer: Future[Rollouts] = Future()
        self.is_cut = False  # whether responses end with the tokens that they have
        self.began = math.inf  # time at which a server got the first response

    def work(self, i: int, ids: list[int], turn: int, most: int) -> _Work:
        """Return a reply to sample: turn `turn` of the response at position `i`, from 0 to N K - 1.

        Raises:
            RunError: an id is beyond the vocabulary, which would end a server.
        """
        if max(ids) >= self.pool.vocabulary:
            raise RunError(
                f"token ids must be < {self.pool.vocabulary} (the vocabulary of the model), got {max(ids)}; "
                "set model.tokenizer to the tokenizer of the model"
            )
        K = self.sampling.samples
        k = self.sampling.begun[i].sample if self.sampling.begun else i % K
        example = int(self.prompts.index[i // K])
        given = sampling_parameters(self.sampling, example, self.pool.settings, k, turn)
        return _Work(next(self.pool.numbers), self, i, ids, given | {"max_tokens": most})

    def begin(self) -> None:
        """Ask for all responses."""
        heads = self.prompts.unpadded()
        K, length = self.sampling.samples, self.sampling.response_length
        self.found: dict[int, Reply] = {}
        self.count = K * len(heads)
        self.pool.ask([self.work(i, heads[i // K], 0, length) for i in range(self.count)])

    def take(self, i: int, reply: Reply | Exception) -> None:
        """Take reply `i`, in the thread of the pool; the last one ends the request."""
        if self.answer.done():
            return
        try:
            if isinstance(reply, Exception):
                raise reply
            self.found[i] = reply
            if len(self.found) == self.count:
                self.answer.set_result(self.rollouts())
        except Exception as error:
            self.answer.set_exception(error)

    def rollouts(self) -> Rollouts:
        """Return all replies as rollouts."""
        replies = [self.found[i] for i in range(self.count)]
        versions = [each.versions for each in replies]
        by_token = versions if self.pool.in_flight else None
        rollouts = rollouts_of(self.prompts, self.sampling, replies, by_token, self.pool.settings)
        oldest = min(version for each in versions for version in each)
        return replace(rollouts, version=oldest, generate_s=time.perf_counter() - self.began)


class _Conversation(_Request):
    """A request with an environment, played in a thread; the random numbers are those of one vLLM."""

    def begin(self) -> None:
        """Start the thread."""
        self.replies: SimpleQueue[tuple[int, Reply | Exception]] = SimpleQueue()
        self.pool.hold(self.version, 1)
        threading.Thread(target=self.run, name="episodes", daemon=True).start()

    def take(self, i: int, reply: Reply | Exception) -> None:
        """Give reply `i` to the thread."""
        self.replies.put((i, reply))

    def run(self) -> None:
        """Play all episodes."""
        settle(self.answer, self.play)
        self.pool.hold(self.version, -1)

    def play(self) -> Rollouts:
        """Return the episodes as rollouts."""
        settings, turns, asked = self.pool.settings, Counter[int](), 0
        oldest = math.inf
        assert settings.environment is not None
        played = settings.environment, settings.stop_ids, settings.seed
        with Episodes(self.prompts, self.sampling, *played) as episodes:
            while True:
                works = []
                for i in episodes.ready(wait=not asked):
                    works.append(self.work(i, episodes.history(i), turns[i], episodes.room(i)))
                    turns[i] += 1
                self.pool.ask(works)
                asked += len(works)
                if not asked:
                    break
                with suppress(Empty):
                    i, reply = self.replies.get(timeout=_LOOK_S if episodes.open else None)
                    asked -= 1
                    if isinstance(reply, Exception):
                        raise reply
                    oldest = min(oldest, *reply.versions)
                    versions = reply.versions if self.pool.in_flight else None
                    episodes.reply(i, reply.ids, reply.logprobs, versions)
            rollouts = episodes.rollouts(settings.pad_id, in_flight=self.pool.in_flight)
        return replace(rollouts, version=int(oldest), generate_s=time.perf_counter() - self.began)


# Builder of a generator of servers.


FOLDER = "weights"  # in the run folder


def build(config: VLLMServerConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with the servers of `config.urls`, or with servers that it starts.

    Raises:
        UserError: the host has too few GPUs, or vLLM does not support the model.
    """
    devices = () if config.urls else place(config, torch.cuda.device_count())
    trainer, nccl = context.policy.device, torch.distributed.is_nccl_available()
    transfer = route(config, bool(devices or config.urls), trainer, nccl)  # named servers tell theirs
    settings = factory(config, context, bool(devices), transfer)
    start_s = config.start_limit(on_gpu=torch.cuda.is_available())
    limits = start_s, config.answer_limit_s, config.request_limit_s
    servers = []
    if config.urls:
        key = os.environ[config.key_variable] if config.key_variable else None
        wanted = settings.config().to_dict()
        for url in config.urls:
            servers.append(Server(url, url, key, *limits, accept=partial(check, settings, wanted, url)))
    else:  # the run starts them on this host, each with its GPUs
        key, arguments = token_urlsafe(), command(settings, "127.0.0.1")
        for i in range(config.servers):
            own = variables_of(i, devices, config, context.threads) | variables(settings, key)
            child = Child(arguments, own, context.folder / f"server-{i}.log")
            servers.append(Server(f"server {i}", None, key, *limits, child))
    # Several runs may have the same generator.folder
    folder = Path(config.folder, context.folder.name) if config.folder else context.folder / FOLDER
    dtype, files = getattr(torch, settings.dtype), transfer is Transfer.shared_memory
    workers = config.tensor_parallel_size
    store = SharedWeights(dtype, folder) if files else build_store(transfer, trainer, dtype, workers)
    size, most = context.policy.config.get_text_config().vocab_size, config.restarts
    pool = ServerPool(servers, store, settings, vocabulary=size, restarts=most, in_flight=context.in_flight)
    return annotated(pool, config, context)
