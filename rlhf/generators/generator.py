"""What a generator is: a queue of requests and weight loads, worked off strictly first in, first out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics


class Generator(ABC):
    """Answers prompts with rollouts. Requests and loads are first in, first out: a request is sampled by the
    weights of the last load before it, and its rollouts carry that version. With `schedule.update=in_flight`
    loads overtake requests, and tokens carry their versions.

    Raises RunError, from any method or future, where it cannot go on.
    """

    @abstractmethod
    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for K responses to each prompt."""

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample later requests with these weights."""

    def figures(self) -> Metrics:
        """Figures of the generator itself since the last call, for a row of metrics; here none."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release what the generator holds; here nothing."""


def finished(rollouts: Rollouts) -> Future[Rollouts]:
    """The future of an answer that is there already."""
    future: Future[Rollouts] = Future()
    future.set_result(rollouts)
    return future
