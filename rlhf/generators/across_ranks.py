"""Generators for runs with several ranks: one generator for all ranks, or one per rank.

In both cases every rank submits all prompts and gets the rollouts of all prompts. The ranks exchange rollouts
in the first call of a future's `result()`. This call is a collective: all ranks must call `result()` of their
futures in the same order. The same applies to `wait()` of the generators. `backend.timeout_s` does not limit
these waits, because a generator may restart its process several times; `generator.request_limit_s`,
`.start_limit_s` and `.restarts` limit them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.core.batch import Prompts, Rollouts, concatenated
from rlhf.generators.generator import Generator

if TYPE_CHECKING:
    from rlhf.core.batch import Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.processes.ranks import Ranks


class Answer(Future[Rollouts]):
    """A future of the rollouts of all prompts, exchanged between the ranks in the first call of `result()`.

    Args:
        prompts: the prompts of the request, the same on every rank.
        part: future of the rollouts that this rank's generator samples; None if the rank has no generator.
        ranks: the ranks of the run.
    """

    def __init__(self, prompts: Prompts, part: Future[Rollouts] | None, ranks: Ranks) -> None:
        super().__init__()
        self.prompts = prompts
        self.part = part
        self.ranks = ranks

    def whole(self) -> Rollouts:
        """Exchange the rollouts of all prompts between the ranks and return them."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Rollouts:
        """Return the rollouts of all prompts; the first call is a collective.

        Args:
            timeout: has no effect, because the exchange does not end early.

        Raises:
            RunError: the generator of a rank failed.
        """
        if not self.done():
            try:
                self.set_result(self.whole())
            except BaseException as error:
                self.set_exception(error)
        return super().result(timeout)


class Shared(Answer):
    """A future for a single generator, on the first rank, which samples the rollouts of all prompts."""

    def whole(self) -> Rollouts:
        """Send the rollouts of all prompts from the first rank to all ranks, and return them."""
        return self.ranks.from_first(lambda: self.part.result())  # type: ignore[union-attr]


class Gathered(Answer):
    """A future for one generator per rank; each generator samples the rollouts of its rank's prompts."""

    def whole(self) -> Rollouts:
        """Gather the rollouts of all ranks, and return the rollouts of all prompts."""
        assert self.part is not None
        self.ranks.wait_for(self.part)  # a generator may take long, for example while its process restarts
        parts = self.ranks.gather(self.part.result())
        return put_together(self.prompts, parts)


def put_together(prompts: Prompts, parts: list[Rollouts]) -> Rollouts:
    """Return the rollouts of all `prompts`, given the rollouts of consecutive parts of the prompts.

    The `version` of the result is the lowest version of the parts; other numbers, such as seconds, are the
    highest.
    """
    numbers = {name for name, value in parts[0].as_dict().items() if isinstance(value, int | float)}
    highest = {name: max(getattr(part, name) for part in parts) for name in numbers}
    return replace(parts[0], **{**highest, **concatenated(parts), **prompts.as_dict()})


def _in_thread(call: Callable[[], None]) -> Future[None]:
    """Call a function in another thread and return a future of its end."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class SharedGenerator(Generator):
    """A generator on the first rank that samples for all ranks.

    Args:
        generator: the generator on the first rank; None on the other ranks.
        ranks: the ranks of the run.
    """

    def __init__(self, generator: Generator | None, ranks: Ranks) -> None:
        self.generator = generator
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt from the first rank's generator."""
        part = self.generator.submit(prompts, sampling) if self.generator else None
        return Shared(prompts, part, self.ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into the first rank's generator.

        The other ranks only iterate over `weights`, because gathering sharded weights is a collective.
        """
        if self.generator:
            self.generator.load(weights, version)
        else:
            for _ in weights:
                pass

    def wait(self) -> None:
        """Wait on every rank until the first rank's generator can take new weights."""

        def ready() -> None:
            assert self.generator is not None
            self.generator.wait()

        self.ranks.from_first(ready)

    def figures(self) -> Metrics:
        """Return the metrics of the first rank's generator; empty on the other ranks."""
        return self.generator.figures() if self.generator else {}

    def close(self) -> None:
        """Close the first rank's generator."""
        if self.generator:
            self.generator.close()


class PerRankGenerator(Generator):
    """The generator of one rank, if every rank has a generator; it answers its rank's share of each request.

    Args:
        generator: the generator of this rank.
        ranks: the ranks of the run.
    """

    def __init__(self, generator: Generator, ranks: Ranks) -> None:
        self.generator = generator
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each of this rank's prompts from this rank's generator."""
        rows = self.ranks.rows(len(prompts))
        return Gathered(prompts, self.generator.submit(prompts.select(rows), sampling), self.ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into the generator of every rank."""
        self.generator.load(weights, version)

    def wait(self) -> None:
        """Wait until the generator of every rank can take new weights."""
        waiting = _in_thread(self.generator.wait)
        self.ranks.wait_for(waiting)
        waiting.result()

    def figures(self) -> Metrics:
        """Return the metrics of this rank's generator."""
        return self.generator.figures()

    def close(self) -> None:
        """Close this rank's generator."""
        self.generator.close()
