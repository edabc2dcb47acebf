"""A replay buffer of the last rollout batches (`schedule.replay`).

Each update adds one new batch of N prompts and trains on N prompts that are drawn from the buffer. So the
number of samples and of optimizer steps is the same with and without a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.metrics import mean
from rlhf.core.seeding import derive

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics

ONCE = frozenset({"ref_logprobs"})  # needs that are computed once per prompt: no trained weights are used
PROMPT_TOKENS = ("prompt_ids", "prompt_mask")  # tensors that are padded on the left


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
                parts.append(_with_token_versions(batch.select(rows)))
        versions = torch.tensor([part.version for part in parts for _ in range(len(part))])
        return _concatenated(parts, new, self.pad_id), {"replay/age": mean(new.trainer_version - versions)}

    def load(self, batches: Iterable[Batch]) -> None:
        """Fill the buffer with the batches `earlier` of a checkpoint."""
        self.earlier.extend(batches)


def _with_token_versions(batch: Batch) -> Batch:
    """Return the batch with `token_versions`."""
    if batch.token_versions is not None:
        return batch
    return replace(batch, token_versions=batch.version * batch.response_mask.long())


def _concatenated(parts: Sequence[Batch], new: Batch, pad_id: int) -> Batch:
    """Return one batch with the prompts of all parts, padded to the longest prompt and response.

    Args:
        parts: batches with the same fields set.
        new: the batch whose numbers the result gets, except `version`, which is the lowest of the parts.
        pad_id: token id of padding.
    """

    def joined(name: str, values: Sequence[Tensor]) -> Tensor:
        if name not in PROMPT_TOKENS and values[0].dim() < 3:
            return torch.cat(list(values))
        longest = max(value.shape[-1] for value in values)
        fill = pad_id if name in ("prompt_ids", "response_ids") else 0
        widened = []
        for value in values:
            missing = longest - value.shape[-1]
            sides = (missing, 0) if name in PROMPT_TOKENS else (0, missing)
            widened.append(torch.nn.functional.pad(value, sides, value=fill))
        return torch.cat(widened)

    whole: dict[str, Any] = {"version": min(part.version for part in parts)}
    for field in fields(Batch):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Tensor):
            whole[field.name] = joined(field.name, values)
        elif isinstance(values[0], list):
            whole[field.name] = [item for value in values for item in value]
        elif isinstance(values[0], dict):
            whole[field.name] = {name: joined(name, [value[name] for value in values]) for name in values[0]}
    return replace(new, **whole)
