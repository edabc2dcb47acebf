"""Rollouts in order, with a bounded number of later requests in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.generators.generator import finished

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Timer
    from rlhf.generators.generator import Generator


class Stream:
    """Yields finished rollouts in the order of their prompts; at most `max_lag` later requests are in flight.

    The generator works first in, first out and is given new weights after each batch, so the request of
    batch t (from 0) is sampled by version max(0, t - max_lag): 0 is synchronous, 1 is the paper's
    asynchronous RLHF. With `schedule.update=in_flight` none of its tokens is of an older version than that.

    Args:
        generator: answers the requests.
        prompts: the prompts of the batches that are still to be requested, in order; its end ends the stream.
        sampling: of every request; `sampling.request` is the number of the first.
        max_lag: later requests in flight while a batch is trained on.
        timer: counts the seconds that the caller waits for rollouts under `wait`.
        in_flight: rollouts of an earlier session that were requested but not yet trained on; they come first.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Iterable[Prompts],
        sampling: Sampling,
        max_lag: int,
        timer: Timer,
        in_flight: Iterable[Rollouts] = (),
    ) -> None:
        self.generator = generator
        self.prompts = iter(prompts)
        self.sampling = sampling
        self.max_lag = max_lag
        self.timer = timer
        self.pending: deque[Future[Rollouts]] = deque(finished(rollouts) for rollouts in in_flight)

    def __iter__(self) -> Iterator[Rollouts]:
        while True:
            with self.timer("wait"):
                while len(self.pending) <= self.max_lag and (prompts := next(self.prompts, None)) is not None:
                    self.pending.append(self.generator.submit(prompts, self.sampling))
                    self.sampling = replace(self.sampling, request=self.sampling.request + 1)
                if not self.pending:
                    return
                rollouts = self.pending.popleft().result()
            yield rollouts

    def in_flight(self) -> list[Rollouts]:
        """The requests that are not yet trained on, finished (waits for them): a checkpoint keeps them."""
        return [future.result() for future in self.pending]
