"""A generator that splits a request into chunks and reports progress after each chunk."""

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


class ChunkedGenerator(Generator):
    """A generator that answers a request in chunks of `size` prompts.

    After each chunk, the generator calls its attribute `advance` with the number of prompts in the chunk. The
    samples do not depend on the chunk size, because the random numbers of a sample depend on its example, not
    on the batch.

    Args:
        generator: the generator that answers the chunks.
        size: prompts per chunk.
    """

    def __init__(self, generator: Generator, size: int) -> None:
        self.generator = generator
        self.size = size
        self.advance: Callable[[int], None] = lambda count: None

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample K responses to each prompt, chunk by chunk, and return a finished future."""
        parts = []
        for rows in torch.arange(len(prompts)).split(self.size):
            parts.append(self.generator.submit(prompts.select(rows), sampling).result())
            self.advance(len(rows))
        return finished(put_together(prompts, parts))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights of a version, for the requests submitted after this call."""
        self.generator.load(weights, version)
