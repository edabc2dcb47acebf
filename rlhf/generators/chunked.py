"""A generator that tells how far it is with a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.generators.across_ranks import put_together
from rlhf.generators.generator import Generator, finished

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling


class InParts(Generator):
    """Answers `size` prompts of a request after the other, and calls `advance` with their number.

    Samples are those of the whole request: they depend on the example, not on what is decoded beside it.
    """

    def __init__(self, generator: Generator, size: int) -> None:
        self.generator = generator
        self.size = size
        self.advance: Callable[[int], None] = lambda count: None

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Answer now."""
        parts = []
        for rows in torch.arange(len(prompts)).split(self.size):
            parts.append(self.generator.submit(prompts.select(rows), sampling).result())
            self.advance(len(rows))
        return finished(put_together(prompts, parts))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample later requests with these weights."""
        self.generator.load(weights, version)
