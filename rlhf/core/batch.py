"""What flows through the loop: prompts, then rollouts, then a batch, each adding to the one before.

    N prompts, K samples of a prompt, P prompt tokens, T response tokens

Everything is cut along N only, so a group of K samples is never split. Prompts are padded on the left,
responses on the right. Masks are bool, True = a real token. Log-probs are float32, of the sampled tokens, at
the sampling temperature, and 0 where the mask is False.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from rlhf.core.seeding import derive

B = TypeVar("B", bound="Prompts")


R = TypeVar("R", bound="Rollouts")


@dataclass(slots=True, kw_only=True)
class Prompts:
    """N examples of a task. `completions` (N lists of K texts) and `labels` only where they are stored."""

    index: Tensor  # [N] int64, row in the task's data set: names an example for replay
    texts: list[str]  # N prompts
    references: list[str]  # N reference responses; "" where the data set has none
    prompt_ids: Tensor  # [N, P] int64, padded left
    prompt_mask: Tensor  # [N, P] bool
    completions: list[list[str]] | None = None  # N x K
    labels: Tensor | None = None  # [N, K] float32

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Tensor) -> Self:
        """The examples `rows` ([M] int64), in that order."""
        places = rows.tolist()
        cut: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                cut[f.name] = value[rows.to(value.device)]
            elif isinstance(value, dict):
                cut[f.name] = {name: part[rows.to(part.device)] for name, part in value.items()}
            elif isinstance(value, list):
                cut[f.name] = [value[i] for i in places]
        return replace(self, **cut)

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                moved[f.name] = value.to(device)
            elif isinstance(value, dict):
                moved[f.name] = {name: part.to(device) for name, part in value.items()}
        return replace(self, **moved)

    def extend(self, kind: type[B], **added: Any) -> B:
        """This as the later stage `kind`, with the fields `added`."""
        return kind(**{f.name: getattr(self, f.name) for f in fields(self)}, **added)


@dataclass(slots=True, kw_only=True)
class Rollouts(Prompts):
    """N prompts with K responses each. Where they are sampled, T is the length that was allowed."""

    response_ids: Tensor  # [N, K, T] int64, padded right
    response_mask: Tensor  # [N, K, T] bool; the stop token belongs to the response
    ended: Tensor  # [N, K] bool: a stop token was reached
    behaviour_logprobs: Tensor | None = None  # [N, K, T], by the sampler; None for stored completions
    version: int = 0  # of the weights that sampled; where `token_versions` differ, the oldest
    token_versions: Tensor | None = None  # [N, K, T] int64, 0 at padding; None: all tokens are of `version`
    generate_s: float = 0.0  # seconds the generator worked on it

    def versions(self) -> set[int]:
        """Of the weights that sampled its tokens."""
        if self.token_versions is None:
            return {self.version}
        return set(self.token_versions[self.response_mask].unique().tolist())

    @property
    def episodes(self) -> int:
        """N times K."""
        return self.response_ids.shape[0] * self.response_ids.shape[1]


@dataclass(slots=True, kw_only=True)
class Batch(Rollouts):
    """Rollouts with scores, and what engine and objective add to them."""

    scores: Tensor  # [N, K] float32
    parts: dict[str, Tensor] | None = None  # [N, K] each: what a weighted score is the sum of, unweighted
    ref_logprobs: Tensor | None = None  # [N, K, T]
    old_logprobs: Tensor | None = None  # [N, K, T]; None: the first forward gives them (one step a batch)
    values: Tensor | None = None  # [N, K, T+1], position t: of the state after t response tokens
    value_mask: Tensor | None = None  # [N, K, T+1] bool, the states whose value is learned
    advantages: Tensor | None = None  # [N, K, T]
    returns: Tensor | None = None  # [N, K, T+1]
    signal: Tensor | None = None  # [N] bool: False rows are not trained on; None: all are
    annotate_ahead_s: float = 0.0  # seconds that another process worked on scores and reference

    def minibatches(self, count: int, epochs: int, seed: int, update: int) -> Iterator[Batch]:
        """Cut the prompts into `count` equal parts, `epochs` times, shuffled by (seed, update, epoch)."""
        for epoch in range(epochs):
            if count == 1:  # the order within one step changes nothing
                yield self
                continue
            rng = torch.Generator().manual_seed(derive(seed, "minibatches", update, epoch))
            for rows in torch.randperm(len(self), generator=rng).chunk(count):
                yield self.select(rows)

    def samples(self, columns: Tensor) -> Batch:
        """For each prompt the samples `columns` ([N, J] int64), as a batch with K = J."""
        device = columns.device
        rows = torch.arange(len(self), device=device)[:, None]
        cut = {
            f.name: getattr(self, f.name)[rows, columns]
            for f in fields(self)
            if f.name in PER_SAMPLE and getattr(self, f.name) is not None
        }
        parts = self.parts and {name: part[rows, columns] for name, part in self.parts.items()}
        return replace(self, completions=None, labels=None, parts=parts, **cut)


PER_SAMPLE = frozenset(
    {
        "response_ids",
        "response_mask",
        "ended",
        "behaviour_logprobs",
        "token_versions",
        "scores",
        "ref_logprobs",
        "old_logprobs",
        "values",
        "value_mask",
        "advantages",
        "returns",
    }
)


def trim(batch: B) -> B:
    """Drop prompt columns and response positions that no row uses; two columns stay. Of T+1 states one more
    is kept.
    """
    # Two at least: prompts of one token would spare the first pass over shared prefixes, which ranks of a
    # sharded model make together.
    longest = max(2, int(batch.prompt_mask.sum(1).max()))
    cut: dict[str, Any] = {
        "prompt_ids": batch.prompt_ids[:, -longest:],
        "prompt_mask": batch.prompt_mask[:, -longest:],
    }
    if isinstance(batch, Rollouts):
        length = batch.response_mask.shape[-1]
        used = int(batch.response_mask.sum(-1).max())
        unused = length - min(length, max(1, used))
        for f in fields(batch):
            value = getattr(batch, f.name)
            if isinstance(value, Tensor) and value.dim() == 3:
                cut[f.name] = value[..., : value.shape[-1] - unused]
    return replace(batch, **cut)


def microbatches(batch: R, sequences: int, rank: int = 0, size: int = 1) -> Iterator[tuple[Tensor, R, bool]]:
    """Cut a batch into micro-batches of at most `sequences` sequences (but one prompt's at least), formed by
    length and trimmed to it, and deal them to `size` ranks. Rows without signal are left out. The longest
    come first: what they needed has room for those that follow, and where memory is too small, it shows.

    Yields those of `rank`: (rows of the batch [M], micro-batch, whether it counts). Ranks get equally many,
    as forwards and backwards of a sharded model are made by all together; where they do not come out even,
    one that another rank has stands in, and does not count.
    """
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(-1).amax(1)
    order = torch.argsort(lengths, descending=True, stable=True)
    if isinstance(batch, Batch) and batch.signal is not None:
        order = order[batch.signal[order]]
    if not len(order):
        return
    most = max(1, sequences // batch.response_ids.shape[1])
    rounds = math.ceil(len(order) / (most * size))
    parts = order.split(math.ceil(len(order) / (rounds * size)))
    for first in range(0, rounds * size, size):
        mine = first + rank
        rows = parts[min(mine, len(parts) - 1)]
        yield rows, trim(batch.select(rows)), mine < len(parts)


class Outputs(NamedTuple):  # DeepSpeed hooks into the tensors of a tuple
    """What a forward gives for rollouts; None: this model has no such head."""

    logprobs: Tensor | None = None  # [N, K, T] float32, 0 where the response mask is False
    values: Tensor | None = None  # [N, K, T+1] float32, position t: of the state after t response tokens
    rewards: Tensor | None = None  # [N, K] float32


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How a request is to be answered. `purpose` and `request` name its random numbers, for replay."""

    samples: int  # K
    temperature: float
    response_length: int  # tokens
    purpose: str  # train, eval, ...
    request: int = 0
