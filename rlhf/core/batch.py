"""Data classes of the training loop: `Prompts`, its subclass `Rollouts`, and their subclass `Batch`.

    N prompts, K samples per prompt, S stored responses per prompt, P prompt tokens, T response tokens,
    Q tokens of the teacher's prompt, C candidates of a served teacher for a token

Batches are split along N only, so the K samples of a prompt stay together. Prompts are padded on the left,
responses on the right. Masks are bool: True marks a real token. Log-probs are float32: the log-prob of each
response token at the sampling temperature, and 0 where the response mask is False.

A response may be an episode, in which the model replies several times and an environment answers each reply
with a message. E is the end token of a reply; a message ends with the marks that begin the next reply:

    response_ids      a a a E m m m m a a E pad
    response_mask     1 1 1 1 0 0 0 0 1 1 1  0      sampled by the model, trained
    environment_mask  0 0 0 0 1 1 1 1 0 0 0  0      read by the model only
    rewards           0 0 0 r 0 0 0 0 0 0 r  0      of each turn, at the last token of its reply

A field that is no number declares its dimensions, such as `Annotated[Tensor, "N K T"]`. A dict of tensors
declares the dimensions of each tensor. A name that ends in `_ids` marks token ids. The functions that select,
move, trim and concatenate follow the declarations, so a new field needs only its own line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, NamedTuple, Self, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.core.launched import derive

Completion = str | list[str]  # a text; or an episode: a reply, messages, a reply, ..., a reply
B = TypeVar("B", bound="Prompts")
R = TypeVar("R", bound="Rollouts")


@dataclass(slots=True, kw_only=True)
class Prompts:
    """N prompts of a task with their references.

    `completions` and `labels` are set only if the data set contains responses and their scores. `dialogues`
    and `tools` are set only if the data set contains lists of messages, `part` only if the task is a mixture
    of tasks, `records` only if a reward function asks for columns of the data, `teacher_ids` and
    `teacher_mask` only if a teacher has prompts of its own, `places` only if a task read the prompts.
    """

    index: Annotated[Tensor, "N"]  # int64, row of the example in the task's data set
    texts: Annotated[list[str], "N"]
    references: Annotated[list[str], "N"]  # reference responses; "" if none; control tokens are quoted
    prompt_ids: Annotated[Tensor, "N P"]  # int64, padded on the left
    prompt_mask: Annotated[Tensor, "N P"]  # bool
    completions: Annotated[list[list[Completion]] | None, "N S"] = None  # stored; quoted as references
    labels: Annotated[Tensor | None, "N S"] = None  # float32, stored scores of the stored responses
    # Lists of messages (role, content and further keys) that `texts` were formatted from, and the tools of
    # each dialogue; None: the data are texts
    dialogues: Annotated[list[list[dict[str, Any]]] | None, "N"] = None
    tools: Annotated[list[list[dict[str, Any]] | None] | None, "N"] = None
    part: Annotated[Tensor | None, "N"] = None  # int64, number of the part of the mixture with the prompt
    records: Annotated[list[dict[str, Any]] | None, "N"] = None  # the columns that functions ask for
    teacher_ids: Annotated[Tensor | None, "N Q"] = None  # int64, padded on the left
    teacher_mask: Annotated[Tensor | None, "N Q"] = None  # bool
    places: Annotated[list[str] | None, "N"] = None  # places in the data ("line 14 of a.jsonl"), for messages

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def prompt_tokens(self) -> Tensor:
        """The number of tokens of each prompt, [N] int64: of the longer one, if a teacher has its own."""
        own = self.prompt_mask.sum(1)
        return own if self.teacher_mask is None else own.maximum(self.teacher_mask.sum(1))

    def for_teacher(self) -> Self:
        """Return the prompts, or rollouts, as a teacher reads them: with its own prompts, if it has any."""
        own: dict[str, Any] = {"prompt_ids": self.teacher_ids, "prompt_mask": self.teacher_mask}
        return self if self.teacher_ids is None else replace(self, **own)

    def unpadded(self) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return [ids[mask].tolist() for ids, mask in zip(self.prompt_ids, self.prompt_mask, strict=True)]

    def place(self, example: int) -> str:
        """Return where the data have the example, from 0 to N - 1, for messages."""
        return (
            f"row {int(self.index[example]) + 1} of the data" if self.places is None else self.places[example]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, not copied."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def select(self, rows: Tensor) -> Self:
        """Return the M examples at `rows` ([M] int64), in the order of `rows`."""
        positions = rows.tolist()

        def selected(shape: _Shape, x: Tensor | list[Any]) -> Tensor | list[Any]:
            return x[rows.to(x.device)] if isinstance(x, Tensor) else [x[i] for i in positions]

        return replace(self, **_mapped(selected, self))

    def to(self, device: torch.device) -> Self:
        """Return a copy whose tensors are on `device`."""
        return replace(
            self, **_mapped(lambda _, x: moved_to(device, x) if isinstance(x, Tensor) else x, self)
        )

    def extend(self, kind: type[B], **added: Any) -> B:
        """Return an instance of the subclass `kind` with the fields of `self` and the fields `added`."""
        return kind(**self.as_dict(), **added)


class _Shape(NamedTuple):
    dims: tuple[str, ...]  # ("N", "K", "T")
    token_ids: bool  # padded with the pad token; other tensors are padded with 0


@cache
def _shapes(kind: type) -> dict[str, _Shape]:
    """Return the shape of each field of a data class that is no number."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: _Shape(tuple(hint.__metadata__[0].split()), name.endswith("_ids"))
        for name, hint in hints.items()
        if hint not in (int, float, bool)
    }


def _mapped(change: Callable[..., Any], batch: Prompts, *others: Prompts) -> dict[str, Any]:
    """Return `change(shape, *values)` of each field that is set, by name; a dict maps each of its tensors."""
    changed: dict[str, Any] = {}
    for name, shape in _shapes(type(batch)).items():  # type: ignore[arg-type]
        if (first := getattr(batch, name)) is None:
            continue
        rest = [getattr(other, name) for other in others]
        if isinstance(first, dict):
            keys = dict.fromkeys(chain(first, *rest))
            changed[name] = {
                key: change(shape, *(_tensor(each, key) for each in (first, *rest))) for key in keys
            }
        else:
            changed[name] = change(shape, first, *rest)
    return changed


def _tensor(table: dict[str, Tensor], key: str) -> Tensor:
    """Return a tensor of a dict, or zeros: an environment may give a figure to some batches only."""
    return table[key] if key in table else torch.zeros_like(next(iter(table.values())))


def moved_to(device: torch.device, x: Tensor) -> Tensor:
    """Return `x` on `device`. A copy to a GPU does not wait until the GPU has finished its earlier work."""
    return x.to(device, non_blocking=device.type != "cpu")


@dataclass(slots=True, kw_only=True)
class Rollouts(Prompts):
    """N prompts with K responses each. T is the length limit if the responses were sampled."""

    response_ids: Annotated[Tensor, "N K T"]  # int64, padded on the right
    response_mask: Annotated[Tensor, "N K T"]  # bool: tokens that the model sampled, also the stop token
    ended: Annotated[Tensor, "N K"]  # bool: a stop token, or the environment, ended the response
    behaviour_logprobs: Annotated[Tensor | None, "N K T"] = None  # from the sampler; None: stored responses
    version: int = 0  # version of the weights that sampled; the oldest version if several did
    trainer_version: int = 0  # version of the weights just before they are trained on these rollouts
    token_versions: Annotated[Tensor | None, "N K T"] = None  # int64, 0 at padding; None: `version` for all
    generate_s: float = 0.0  # seconds that sampling took
    # Of an environment; None: there is none
    environment_mask: Annotated[Tensor | None, "N K T"] = None  # bool: tokens of its messages
    rewards: Annotated[Tensor | None, "N K T"] = None  # float64, at the last tokens of replies
    episode: Annotated[dict[str, Tensor] | None, "N K"] = None  # float32: turns and other figures

    @property
    def real(self) -> Tensor:
        """All tokens that are no padding, [N, K, T] bool: those of the model and of an environment."""
        mask, messages = self.response_mask, self.environment_mask
        return mask if messages is None else mask | messages

    @property
    def last_reply(self) -> Tensor:
        """The tokens of the last reply of the model, [N, K, T] bool."""
        if self.environment_mask is None:
            return self.response_mask
        messages_after = self.environment_mask.flip(-1).cumsum(-1).flip(-1)
        return self.response_mask & (messages_after == 0)

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

    scores: Annotated[Tensor, "N K"]  # float32
    # Unweighted scores of a weighted scorer's parts, or those of the members of an ensemble
    parts: Annotated[dict[str, Tensor] | None, "N K"] = None
    part_weights: Annotated[dict[str, Tensor] | None, "N"] = None  # factors of `parts` in the score, if a sum
    ref_logprobs: Annotated[Tensor | None, "N K T"] = None  # of the reference model
    # Of a served teacher: "ids" (int64) of its most probable tokens, and their "logprobs" (-inf: no token)
    candidates: Annotated[dict[str, Tensor] | None, "N K T C"] = None
    # Of the policy just before this update. None: with one optimizer step per batch, the training
    # forward pass (or an on-policy sampler) gives the same values.
    old_logprobs: Annotated[Tensor | None, "N K T"] = None
    # The weights just before this update have sampled, and log-probs of sampler and trainer differ only by
    # rounding: corrections use those of the trainer for both (`rlhf.objectives.objective.sampler_logprobs`).
    on_policy: bool = False
    values: Annotated[Tensor | None, "N K T+1"] = None  # position t: state after t response tokens
    value_mask: Annotated[Tensor | None, "N K T+1"] = None  # bool: the value of the state is trained
    advantages: Annotated[Tensor | None, "N K T"] = None
    returns: Annotated[Tensor | None, "N K T+1"] = None
    signal: Annotated[Tensor | None, "N"] = None  # bool, False: the prompt is not trained on; None: all are
    per_token: Annotated[dict[str, Tensor] | None, "N K T"] = None  # what else `credit` computed for the loss
    annotate_ahead_s: float = 0.0  # seconds of the annotator process for scores and ref_logprobs
    # Figures of the scorer about its work, float64: total and count in the first row, 0 in the others. They
    # are those of all N prompts, so they are taken out before a part is selected; see `metrics.of_scorer`.
    figures: Annotated[dict[str, Tensor] | None, "N 2"] = None

    @property
    def member_spread(self) -> Tensor | None:
        """The standard deviation [N, K] of the scores of the members of an ensemble; None: there is none."""
        several = self.parts if self.part_weights is None and len(self.parts or ()) > 1 else None
        return None if several is None else torch.stack([*several.values()]).std(0)

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
        rows = torch.arange(len(self), device=columns.device)[:, None]

        def taken(shape: _Shape, x: Any) -> Any:
            if "S" in shape.dims:
                return None
            return x[rows, columns] if "K" in shape.dims else x

        return replace(self, **_mapped(taken, self))


def trim(batch: B) -> B:
    """Remove the prompt columns and response positions that are padding in every row.

    At least two prompt columns and one response position are kept. A tensor over the T+1 states keeps one
    position more than a tensor over the T tokens.
    """
    # At least two columns: with prompts of one token, a rank would skip the forward pass over shared
    # prefixes, in which all ranks of a sharded model must take part.
    masks = {"P": batch.prompt_mask, "Q": batch.teacher_mask}
    longest = {dim: max(2, int(mask.sum(1).max())) for dim, mask in masks.items() if mask is not None}
    unused = 0
    if isinstance(batch, Rollouts):
        length = batch.response_mask.shape[-1]
        unused = length - min(length, max(1, int(batch.real.sum(-1).max())))

    def cut(shape: _Shape, x: Any) -> Any:
        match shape.dims:
            case (_, "P" | "Q" as dim):
                return x[:, -longest[dim] :]
            case (_, _, "T" | "T+1", *_):
                return x[:, :, : x.shape[2] - unused]
        return x

    return replace(batch, **_mapped(cut, batch))


def concatenated(parts: Sequence[Prompts], pad_id: int | None = None) -> dict[str, Any]:
    """Return the fields of one batch with the prompts of all parts, and `version`, the lowest of the parts.

    Args:
        parts: batches with the same fields set.
        pad_id: token id of the padding to the longest prompt and response; None: lengths must be equal.
    """

    def joined(shape: _Shape, *values: Any) -> Any:
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        tokens = [place for place, dim in enumerate(shape.dims) if dim in ("P", "Q", "T", "T+1")]
        for place in tokens if pad_id is not None else ():
            longest = max(value.shape[place] for value in values)
            fill, after = pad_id if shape.token_ids else 0, (0, 0) * (values[0].ndim - place - 1)
            missing = [longest - value.shape[place] for value in values]
            sides = [(count, 0) if shape.dims[place] in "PQ" else (0, count) for count in missing]
            values = tuple(pad(x, after + side, value=fill) for x, side in zip(values, sides, strict=True))
        return torch.cat(values)

    versions = [part.version for part in parts if isinstance(part, Rollouts)]
    return ({"version": min(versions)} if versions else {}) | _mapped(joined, *parts)


def grouped(samples: Sequence[Rollouts]) -> Rollouts:
    """Return K rollouts [N, 1, T] of the same prompts as rollouts [N, K, T]."""

    def joined(shape: _Shape, *values: Any) -> Any:
        return torch.cat(values, 1) if shape.dims[:2] == ("N", "K") else values[0]

    return replace(
        samples[0],
        **_mapped(joined, *samples),
        version=min(each.version for each in samples),
        generate_s=max(each.generate_s for each in samples),
    )


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
    lengths = batch.prompt_tokens + batch.real.sum(-1).amax(1)
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
    prompts = batch.prompt_tokens[order].tolist()
    responses = batch.real.sum(-1).amax(1)[order].tolist()
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
    divergence: Tensor | None = None  # [N, K, T] float32, from the teacher's distribution; 0 at padding
    # [N, K, T, 1 + 2C] float32, of a served teacher: the log-prob; log-prob and id of each candidate in turn
    candidates: Tensor | None = None


class Begun(NamedTuple):
    """A response that earlier requests have begun to sample."""

    request: int  # whose random numbers it has
    sample: int  # which sample of its prompt it is, from 0
    ids: list[int]  # its tokens so far
    sampled: list[bool]  # per token: by the model, not by an environment


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of a request. `purpose`, `request` and the run's seed select the random numbers.

    `numbers`, `most` and `begun` are for parts of responses; the rollouts have the further tokens only. Only
    a generator whose section has `samples_parts` heeds them.
    """

    samples: int  # K, responses per prompt
    temperature: float
    response_length: int  # maximum number of tokens
    purpose: str  # "train", "eval", ...
    request: int = 0  # number of the request
    # [N, K, >= max(most)] float64, one uniform number per further token, instead of the selected ones
    numbers: Tensor | None = None
    most: Tensor | None = None  # [N, K] int64, largest number of tokens to sample for each response; None: T
    begun: list[Begun] | None = None  # N * K; K is 1 if one has tokens. None: no request has begun any
