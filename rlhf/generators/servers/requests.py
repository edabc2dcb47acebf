"""Requests to a pool of servers: responses, or episodes that environments answer."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.core.batch import Rollouts
from rlhf.environments.episodes import Episodes
from rlhf.generators.vllm.sequences import rollouts_of, sampling_parameters, seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.core.batch import Prompts, Sampling
    from rlhf.generators.servers.server import Reply
    from rlhf.generators.vllm.sampler import VLLMFactory

_LOOK_S = 0.02  # between two looks at answers of environments


class Pool(Protocol):
    """What a request needs of the pool of servers."""

    settings: VLLMFactory
    in_flight: bool  # whether weights change while a response is sampled

    def ask(self, works: Sequence[Work]) -> None:
        """Queue responses, from any thread."""

    def hold(self, version: int | None, more: int) -> None:
        """Count the open requests whose later replies need the same version, from any thread."""

    def work(self, request: Request, place: int, ids: list[int], parameters: dict[str, Any]) -> Work:
        """Return a response to sample."""


@dataclass(slots=True, eq=False)
class Work:
    """A response to sample."""

    number: int  # in the order in which they were asked for
    request: Request
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


class Request:
    """A request of the trainer, whose answer is a future.

    Args:
        pool: samples the responses.
        prompts: N prompts.
        sampling: K, T and the temperature; single responses (`begun`) have K = 1.
        version: of the weights that must sample them; None: any.
    """

    def __init__(self, pool: Pool, prompts: Prompts, sampling: Sampling, version: int | None) -> None:
        self.pool, self.prompts, self.sampling, self.version = pool, prompts, sampling, version
        self.answer: Future[Rollouts] = Future()
        self.is_cut = False  # whether responses end with the tokens that they have
        self.began = math.inf  # time at which a server got the first response

    def begin(self) -> None:
        """Ask for responses."""
        raise NotImplementedError

    def take(self, i: int, reply: Reply | Exception) -> None:
        """Take reply `i`, in the thread of the pool."""
        raise NotImplementedError

    def work(self, i: int, ids: list[int], turn: int, most: int) -> Work:
        """Return a reply to sample: turn `turn` of the response at position `i`, from 0 to N K - 1."""
        K, settings = self.sampling.samples, self.pool.settings
        k = self.sampling.begun[i].sample if self.sampling.begun else i % K
        given = sampling_parameters(
            self.sampling, int(self.prompts.index[i // K]), settings.stop_ids, settings.seed
        )
        given |= {"seed": seed_of(given["seed"], k, turn), "max_tokens": most}
        return self.pool.work(self, i, ids, given)


class Replies(Request):
    """A request without an environment."""

    def begin(self) -> None:
        """Ask for all responses."""
        heads = self.prompts.unpadded()
        K, length = self.sampling.samples, self.sampling.response_length
        self.found: dict[int, Reply] = {}
        self.count = K * len(heads)
        self.pool.ask([self.work(i, heads[i // K], 0, length) for i in range(self.count)])

    def take(self, i: int, reply: Reply | Exception) -> None:
        """Note reply `i`; the last one ends the request."""
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
        replies, settings = [self.found[i] for i in range(self.count)], self.pool.settings
        versions = [each.versions for each in replies]
        rollouts = rollouts_of(
            self.prompts,
            self.sampling,
            replies,
            versions if self.pool.in_flight else None,
            stop_ids=settings.stop_ids,
            pad_id=settings.pad_id,
        )
        oldest = min(version for each in versions for version in each)
        return replace(rollouts, version=oldest, generate_s=time.perf_counter() - self.began)


class Conversation(Request):
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
        try:
            self.answer.set_result(self.play())
        except BaseException as error:  # nobody else would see it
            self.answer.set_exception(error)
        finally:
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
