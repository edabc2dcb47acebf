"""A replay buffer of the last rollout batches (`schedule.replay`).

Each update adds one new batch of N prompts and trains on N prompts that are drawn from the buffer. So the
number of samples and of optimizer steps is the same with and without a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf.core.batch import Batch, R, concatenated
from rlhf.core.metrics import mean
from rlhf.core.seeding import derive

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics

ONCE = frozenset({"ref_logprobs"})  # needs that are computed once per prompt: no trained weights are used


class Replay:
    """A buffer of the last `size` rollout batches, from which the batch of each update is drawn.

    Prompts are drawn uniformly and without replacement, with all their samples. Seed and update determine the
    draw, so all ranks draw the same prompts. In the first updates the buffer has fewer than `size` batches.

    Args:
        size: number of batches, including the new batch; 1: every update trains on the new batch.
        seed: seed of the run.
        pad_id: token id of padding.
    """

    def __init__(self, size: int, seed: int, pad_id: int) -> None:
        self.size = size
        self.seed = seed
        self.pad_id = pad_id
        self.earlier: deque[Batch] = deque(maxlen=size - 1)  # batches before the new batch, oldest first

    def __call__(self, new: Batch) -> tuple[Batch, Metrics]:
        """Add a batch to the buffer, and return the batch to train on and its metrics.

        The result has the `version` of its oldest prompt and a version for every token. Its other numbers
        (for example seconds) are those of the new batch.

        Args:
            new: the new batch, with scores and, if the objective needs them, reference log-probs.
        """
        if self.size == 1:
            return new, {}
        batches = [*self.earlier, new]
        self.earlier.append(new)
        draw = torch.Generator().manual_seed(derive(self.seed, "replay", new.trainer_version))
        drawn = torch.randperm(sum(map(len, batches)), generator=draw)[: len(new)].sort().values
        parts, first = [], 0
        for batch in batches:
            rows = drawn[(drawn >= first) & (drawn < first + len(batch))] - first
            first += len(batch)
            if len(rows):
                parts.append(with_token_versions(batch.select(rows)))
        versions = torch.tensor([part.version for part in parts for _ in range(len(part))])
        age = mean(new.trainer_version - versions)
        return replace(new, **concatenated(parts, self.pad_id)), {"replay/age": age}

    def load(self, batches: Iterable[Batch]) -> None:
        """Fill the buffer with the batches `earlier` of a checkpoint."""
        self.earlier.extend(batches)


def with_token_versions(batch: R) -> R:
    """Return the batch with `token_versions`."""
    if batch.token_versions is not None:
        return batch
    return replace(batch, token_versions=batch.version * batch.response_mask.long())
