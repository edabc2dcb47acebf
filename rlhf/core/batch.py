"""Data classes of the training loop: `Prompts`, its subclass `Rollouts`, and their subclass `Batch`.

    N prompts, K samples per prompt, P prompt tokens, T response tokens

Batches are split along N only, so the K samples of a prompt stay together. Prompts are padded on the left,
responses on the right. Masks are bool: True marks a real token. Log-probs are float32: the log-prob of each
response token at the sampling temperature, and 0 where the response mask is False.
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
    """N prompts of a task with their references.

    `completions` and `labels` are set only if the data set contains responses and their scores. `dialogues`
    and `tools` are set only if the data set contains lists of messages, `part` only if the task is a mixture
    of tasks, `records` only if a reward function asks for columns of the data, `places` only if a task read
    the prompts.
    """

    index: Tensor  # [N] int64, row of the example in the task's data set
    texts: list[str]  # N prompts
    references: list[str]  # N reference responses; "" if the data set has none
    prompt_ids: Tensor  # [N, P] int64, padded on the left
    prompt_mask: Tensor  # [N, P] bool
    completions: list[list[str]] | None = None  # N lists of K stored responses
    labels: Tensor | None = None  # [N, K] float32, stored scores of the K responses
    # N lists of messages (role, content and further keys) that `texts` were formatted from, and the tools of
    # each dialogue; None: the data are texts
    dialogues: list[list[dict[str, Any]]] | None = None
    tools: list[list[dict[str, Any]] | None] | None = None
    part: Tensor | None = None  # [N] int64, number of the part of the mixture that the prompt comes from
    records: list[dict[str, Any]] | None = None  # N rows of the data: the columns that functions ask for
    places: list[str] | None = None  # N places in the data, such as "line 14 of tasks.jsonl", for messages

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, example: int) -> str:
        """Return where the data have the example, from 0 to N - 1, for messages."""
        return (
            f"row {int(self.index[example]) + 1} of the data" if self.places is None else self.places[example]
        )

    def select(self, rows: Tensor) -> Self:
        """Return the M examples at `rows` ([M] int64), in the order of `rows`."""
        positions = rows.tolist()
        cut: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                cut[f.name] = value[rows.to(value.device)]
            elif isinstance(value, dict):
                cut[f.name] = {name: part[rows.to(part.device)] for name, part in value.items()}
            elif isinstance(value, list):
                cut[f.name] = [value[i] for i in positions]
        return replace(self, **cut)

    def to(self, device: torch.device) -> Self:
        """Return a copy whose tensors are on `device`."""
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                moved[f.name] = moved_to(device, value)
            elif isinstance(value, dict):
                moved[f.name] = {name: moved_to(device, part) for name, part in value.items()}
        return replace(self, **moved)

    def extend(self, kind: type[B], **added: Any) -> B:
        """Return an instance of the subclass `kind` with the fields of `self` and the fields `added`."""
        return kind(**{f.name: getattr(self, f.name) for f in fields(self)}, **added)


def moved_to(device: torch.device, x: Tensor) -> Tensor:
    """Return `x` on `device`. A copy to a GPU does not wait until the GPU has finished its earlier work."""
    return x.to(device, non_blocking=device.type != "cpu")


@dataclass(slots=True, kw_only=True)
class Rollouts(Prompts):
    """N prompts with K responses each. T is the length limit if the responses were sampled."""

    response_ids: Tensor  # [N, K, T] int64, padded on the right
    response_mask: Tensor  # [N, K, T] bool; True also for the stop token
    ended: Tensor  # [N, K] bool: the response ends with a stop token
    behaviour_logprobs: Tensor | None = None  # [N, K, T], from the sampler; None: stored responses
    version: int = 0  # version of the weights that sampled; the oldest version if several did
    trainer_version: int = 0  # version of the weights just before they are trained on these rollouts
    token_versions: Tensor | None = None  # [N, K, T] int64, 0 at padding; None: all tokens have `version`
    generate_s: float = 0.0  # seconds that sampling took

    def versions(self) -> set[int]:
        """Return the versions of the weights that sampled the response tokens."""
        if self.token_versions is None:
            return {self.version}
        return set(self.token_versions[self.response_mask].unique().tolist())

    @property
    def episodes(self) -> int:
        """The number of responses, N times K."""
        return self.response_ids.shape[0] * self.response_ids.shape[1]


@dataclass(slots=True, kw_only=True)
class Batch(Rollouts):
    """Rollouts with scores, and with the tensors that the engine and the objective compute for training."""

    scores: Tensor  # [N, K] float32
    parts: dict[str, Tensor] | None = None  # scores [N, K] of the parts of a weighted scorer, unweighted
    ref_logprobs: Tensor | None = None  # [N, K, T], of the reference model
    # [N, K, T], of the policy just before this update. None: with one optimizer step per batch, the training
    # forward pass (or an on-policy sampler) gives the same values.
    old_logprobs: Tensor | None = None
    # The weights just before this update have sampled, and log-probs of sampler and trainer differ only by
    # rounding: corrections use those of the trainer for both (`rlhf.objectives.objective.sampler_logprobs`).
    on_policy: bool = False
    values: Tensor | None = None  # [N, K, T+1], position t: value of the state after t response tokens
    value_mask: Tensor | None = None  # [N, K, T+1] bool: the value of the state is trained
    advantages: Tensor | None = None  # [N, K, T]
    returns: Tensor | None = None  # [N, K, T+1]
    signal: Tensor | None = None  # [N] bool, False: the prompt is not trained on; None: all are
    per_token: dict[str, Tensor] | None = None  # [N, K, T] by name: what else `credit` computed for the loss
    annotate_ahead_s: float = 0.0  # seconds of the annotator process for scores and ref_logprobs

    def minibatches(self, count: int, epochs: int, seed: int, update: int) -> Iterator[Batch]:
        """Yield `count` minibatches of equal size per epoch; seed, update and epoch determine the order."""
        for epoch in range(epochs):
            if count == 1:  # the order of prompts within one step has no effect
                yield self
                continue
            rng = torch.Generator().manual_seed(derive(seed, "minibatches", update, epoch))
            for rows in torch.randperm(len(self), generator=rng).chunk(count):
                yield self.select(rows)

    def samples(self, columns: Tensor) -> Batch:
        """Return a batch with J samples of each prompt: the samples at `columns` ([N, J] int64)."""
        device = columns.device
        rows = torch.arange(len(self), device=device)[:, None]
        cut: dict[str, Any] = {
            f.name: getattr(self, f.name)[rows, columns]
            for f in fields(self)
            if f.name in _PER_SAMPLE and getattr(self, f.name) is not None
        }
        for name in ("parts", "per_token"):
            if (named := getattr(self, name)) is not None:
                cut[name] = {key: part[rows, columns] for key, part in named.items()}
        return replace(self, completions=None, labels=None, **cut)


_PER_SAMPLE = frozenset(  # names of the tensors with a K dimension
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
    """Remove the prompt columns and response positions that are padding in every row.

    At least two prompt columns and one response position are kept. A tensor over the T+1 states keeps one
    position more than a tensor over the T tokens.
    """
    # At least two columns: with prompts of one token, a rank would skip the forward pass over shared
    # prefixes, in which all ranks of a sharded model must take part.
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
            elif f.name == "per_token" and value is not None:
                cut[f.name] = {name: part[..., : part.shape[-1] - unused] for name, part in value.items()}
    return replace(batch, **cut)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a micro-batch. One prompt with its K samples is never divided, whatever the limits."""

    sequences: int  # prompts x K
    tokens: int | None = None  # sequences x padded length (longest prompt + longest response); None: no limit


def microbatches(batch: R, budget: Budget, rank: int = 0, size: int = 1) -> Iterator[tuple[Tensor, R, bool]]:
    """Yield the micro-batches of one rank: trimmed parts of the batch with sequences of similar length.

    The longest sequences come first. So later micro-batches fit into the memory that the first micro-batch
    needed, and a run with too little memory fails at its first micro-batch. Prompts whose `signal` is False
    are skipped.

    All `size` ranks get the same number of micro-batches, because the ranks of a sharded model run every
    forward and backward together. If the number of micro-batches is not divisible by `size`, some ranks get a
    copy of the last micro-batch as padding, to be trained on with weight 0.

    Args:
        batch: the global batch.
        budget: the limits of a micro-batch. Without a limit of tokens, micro-batches have about equal numbers
            of sequences; with a limit, each has as many as the limits allow.
        rank: the rank whose micro-batches are yielded.
        size: number of ranks.

    Yields:
        The rows of `batch` ([M] int64), the micro-batch of these rows, and True (False for padding).
    """
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(-1).amax(1)
    order = torch.argsort(lengths, descending=True, stable=True)
    if isinstance(batch, Batch) and batch.signal is not None:
        order = order[batch.signal[order]]
    if not len(order):
        return
    if budget.tokens is None:
        most = max(1, budget.sequences // batch.response_ids.shape[1])
        rounds = math.ceil(len(order) / (most * size))
        parts = list(order.split(math.ceil(len(order) / (rounds * size))))
    else:
        parts = _within_tokens(batch, order, budget.sequences, budget.tokens)
        rounds = math.ceil(len(parts) / size)
    for first in range(0, rounds * size, size):
        mine = first + rank
        rows = parts[min(mine, len(parts) - 1)]
        yield rows, trim(batch.select(rows)), mine < len(parts)


def _within_tokens(batch: Rollouts, order: Tensor, sequences: int, tokens: int) -> list[Tensor]:
    """Divide the rows `order` of a batch into consecutive parts, each as large as the limits allow.

    Args:
        batch: the batch.
        order: rows of the batch, the longest first.
        sequences: maximum number of sequences of a part.
        tokens: maximum number of sequences times padded length of a part.
    """
    samples, sizes = batch.response_ids.shape[1], []
    prompts = batch.prompt_mask.sum(1)[order].tolist()
    responses = batch.response_mask.sum(-1).amax(1)[order].tolist()
    count = prompt = response = 0
    for own_prompt, own_response in zip(prompts, responses, strict=True):
        prompt, response = max(prompt, own_prompt), max(response, own_response)
        more = (count + 1) * samples
        if count and (more > sequences or more * (prompt + response) > tokens):
            sizes.append(count)
            count, prompt, response = 0, own_prompt, own_response
        count += 1
    return list(order.split([*sizes, count]))


class Outputs(NamedTuple):  # a tuple, because DeepSpeed adds hooks to the tensors of a tuple
    """Results of a forward pass over rollouts. A result is None if the model does not compute it."""

    logprobs: Tensor | None = None  # [N, K, T] float32, 0 where the response mask is False
    values: Tensor | None = None  # [N, K, T+1] float32, position t: value after t response tokens
    rewards: Tensor | None = None  # [N, K] float32
    entropy: Tensor | None = None  # [N, K, T] float32, of the next-token distribution in nats; 0 at padding
    log_sum_squares: Tensor | None = None  # [N, K, T] float32, log sum_v p(v)^2, no gradient; 0 at padding


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of a request. `purpose`, `request` and the run's seed select the random numbers."""

    samples: int  # K, responses per prompt
    temperature: float
    response_length: int  # maximum number of tokens
    purpose: str  # "train", "eval", ...
    request: int = 0  # number of the request
