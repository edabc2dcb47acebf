"""Forward passes of decoding with a Hugging Face causal LM: the encoding of prompts, and decoding steps.

The prompts are encoded into a key-value cache. Then each decoding step computes one token per sample. Shapes:
B rows of the batch, G samples per row, P prompt tokens, V token ids of the vocabulary, S cache slots.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.models import forward
from rlhf.models.forward import KeysValues, attention_of
from rlhf.models.modules import backbone, logit_scale

log = logging.getLogger(__name__)
T = TypeVar("T")
Choose = Callable[..., tuple[Tensor, Tensor]]  # returns tokens and log-probs, given logits and numbers

TOKENS = {"cpu": 2**12, "cuda": 2**14}  # prompt tokens per forward pass, by device: enough to fill it
# Names of `grouped_attention`, without and with the kernel, in the registries of transformers.
GROUPED, KERNEL = "sdpa_grouped", "sdpa_kernel"


def encode(
    model: PreTrainedModel, ids: Tensor, seen: Tensor, layers: list[RoomyLayer], copies: int
) -> Tensor:
    """Encode prompts into cache layers and return the logits of the next token.

    Each forward pass encodes a part of the prompts, without the padding in front of the longest prompt of the
    part. So there is less padding if the prompts are sorted by length.

    Args:
        model: the causal LM.
        ids: prompts [B, P] int64, padded left.
        seen: [B, P] bool, True at real tokens.
        layers: cache layers, which get the keys and values of every prompt `copies` times.
        copies: rows of the cache per prompt.

    Returns:
        logits [B * copies, 1, V].
    """
    outputs, tokens = [], TOKENS[ids.device.type]
    for rows in torch.arange(len(ids), device=ids.device).split(max(1, tokens // ids.shape[1])):
        mask = seen[rows, -int(seen[rows].sum(1).max()) :]
        parts: list[Any] = [_PartLayer(layer, int(rows[0]) * copies, copies) for layer in layers]
        logits = model(
            input_ids=ids[rows, -mask.shape[1] :],
            attention_mask=mask,
            position_ids=forward.positions(mask),
            **forward.cache_argument(model, Cache(layers=parts)),
            use_cache=True,
            # With 1 instead of an index, the head would get a view and read its weights once per row.
            logits_to_keep=torch.tensor([mask.shape[1] - 1], device=ids.device),
        ).logits
        outputs.append(logits.repeat_interleave(copies, 0))
    return torch.cat(outputs)


def attention(seen: Tensor, group: int, room: int) -> Tensor:
    """Return the attention mask of all decoding steps.

    The cache slots after the prompt belong to the G samples of the row in turn. So a sample attends to its
    prompt and to every G-th slot after the prompt.

    Args:
        seen: [B, P] bool, the real tokens of the prompts.
        group: samples per row, G.
        room: cache slots after the prompt.

    Returns:
        [B, 1, G, P + room] bool. A step uses the columns up to the slots that it writes.
    """
    own = torch.eye(group, dtype=torch.bool, device=seen.device).repeat(1, -(-room // group))[:, :room]
    return torch.cat([seen[:, None].expand(-1, group, -1), own.expand(len(seen), -1, -1)], 2)[:, None]


@dataclass(eq=False)
class Step:
    """A decoding step: a forward pass, and the choice of the next token of each sample from its logits.

    Args:
        model: the causal LM.
        cache: keys and values of all earlier tokens.
        mask: attention mask of all steps: additive [B, 1, G, S], or bool [B, S] with True at tokens. A step
            uses the columns up to the slots that it writes.
        group: samples per row, G.
        length: tokens in the cache, at first those of the longest prompt; some caches have no length.
        choose: returns tokens and log-probs [B, G], given logits [B, G, V] and uniform numbers [B, G].
    """

    model: PreTrainedModel
    cache: Cache
    mask: Tensor
    group: int
    length: int
    choose: Choose
    settled: ClassVar[bool] = True  # whether rows of the batch may be removed before the next step

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, G].

        Args:
            token: the last token of each sample [B, G].
            place: positions of the last tokens in their sequences [B, G].
            numbers: quantiles at which the next tokens are chosen [B, G].
        """
        self.length += self.group
        # No variable for the logits: their memory must be free before the next step allocates its logits.
        return self.choose(self.logits(token, place, self.mask[..., : self.length]), numbers=numbers)

    def logits(self, token: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """Return the logits [B, G, V] of one forward pass under the attention mask `seen`."""
        return self.model(
            input_ids=token,
            attention_mask=seen,
            position_ids=place,
            **forward.cache_argument(self.model, self.cache),
            use_cache=True,
        ).logits

    def looks(self, t: int) -> bool:
        """Return True if the caller should check, before step `t`, which rows are still running."""
        return True

    def keep(self, rows: Tensor) -> None:
        """Remove all rows of the batch except `rows` [B']."""
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


class RereadingStep(Step):
    """A decoding step without a cache: each step reads the sequences from their first token.

    The step works with every model, for example with recurrent models, and is slow.

    Args:
        model: the causal LM.
        ids: prompts [B, P] int64, padded left.
        seen: [B, P] bool, True at real tokens.
        room: tokens after the prompt.
        choose: see `Step`.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, seen: Tensor, room: int, choose: Choose) -> None:
        self.model, self.choose, self.scale = model, choose, logit_scale(model)
        self.ids = torch.nn.functional.pad(forward.padded_right(ids, seen)[0], (0, room))

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, 1]; the arguments are those of `Step.__call__`."""
        self.ids.scatter_(1, place, token)
        return self.choose(self.read(place), numbers=numbers)

    def read(self, place: Tensor) -> Tensor:
        """Return the logits [B, 1, V] after the tokens at the positions `place` [B, 1]."""
        length, base, states = int(place.max()) + 1, backbone(self.model), []
        for rows in torch.arange(len(place)).split(max(1, TOKENS[self.ids.device.type] // length)):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            output = base(input_ids=self.ids[part, :length], use_cache=False).last_hidden_state
            states.append(output.gather(1, place[part, :, None].expand(-1, -1, output.shape[-1])))
        return self.model.get_output_embeddings()(torch.cat(states)) * self.scale

    def keep(self, rows: Tensor) -> None:
        """Remove all rows of the batch except `rows` [B']."""
        self.ids = self.ids[rows]


class _LengthAsked(Exception):
    """An error: the model asked for the length of a cache whose length a CUDA graph has fixed."""


class RoomyLayer(DynamicLayer):
    """A cache layer that allocates memory for all tokens, so that a step writes in place and copies nothing.

    Under autocast, keys and values are stored in the dtype of the matrix products of attention.

    Args:
        rows: rows of the batch.
        prompt: length of the longest prompt in tokens.
        room: slots after the prompt, in tokens.
    """

    def __init__(self, rows: int, prompt: int, room: int) -> None:
        super().__init__()
        self.rows, self.prompt, self.room = rows, prompt, room
        self.slots: Tensor | None = None

    def put(self, keys: Tensor, values: Tensor, first: int, copies: int) -> None:
        """Write the keys and values [B, heads, P, head size] of prompts, `copies` times each.

        The slots before a shorter prompt are set to 0. The mask gives these slots the weight 0, but 0 times a
        NaN of uninitialised memory would be a NaN.

        Args:
            keys: keys of the prompts.
            values: values of the prompts.
            first: first of the B * copies rows that are written.
            copies: rows per prompt.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            # One slot is never used: compiled code is for keys that are a part of this memory, not all of it.
            length = self.prompt + self.room + 1
            self.all_keys, self.all_values = (
                x.new_empty(
                    self.rows, x.shape[1], length, x.shape[3], dtype=forward.product_dtype(x.device, x.dtype)
                )
                for x in (keys, values)
            )
            self.keys, self.values = (x[:, :, : self.prompt] for x in (self.all_keys, self.all_values))
        rows, start = slice(first, first + len(keys) * copies), self.prompt - keys.shape[2]
        for whole, part in ((self.all_keys, keys), (self.all_values, values)):
            whole[rows, :, :start] = 0
            whole[rows, :, start : self.prompt].unflatten(0, (-1, copies)).copy_(part[:, None])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Append keys and values [B, heads, S, head size]; return views of all keys and values so far.

        If a CUDA graph has fixed the length, the views have the fixed length.
        """
        if self.slots is not None:
            assert self.keys is not None and self.values is not None
            for whole, new in ((self.keys, key_states), (self.values, value_states)):
                whole.index_copy_(2, self.slots, new.to(whole.dtype))
            return self.keys, self.values
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        self.all_keys[:, :, start:end] = key_states
        self.all_values[:, :, start:end] = value_states
        self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
        return self.keys, self.values

    def fix(self, slots: Tensor, until: int) -> None:
        """Fix the length of the cache for a CUDA graph.

        Later calls of `update` write to the slots in `slots`, and return the first `until` slots. So no shape
        depends on the number of tokens in the cache. The caller changes the values of `slots` between the
        calls. Unused slots are set to 0.

        Args:
            slots: [S] int64, indices of the slots that the next update writes.
            until: length of the returned keys and values, in slots.
        """
        start = self.get_seq_length()
        for x in (self.all_keys, self.all_values):
            x[:, :, start:until] = 0
        self.keys, self.values = self.all_keys[:, :, :until], self.all_values[:, :, :until]
        self.slots = slots

    def free(self, length: int) -> None:
        """End the fixed length: the cache has `length` tokens, and grows with every update."""
        self.slots = None
        self.keys, self.values = self.all_keys[:, :, :length], self.all_values[:, :, :length]

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache.

        Raises:
            LengthAsked: a CUDA graph has fixed the length, so the CPU does not have the number of tokens.
        """
        if self.slots is not None:
            raise _LengthAsked("the model asks for the length of the cache")
        return super().get_seq_length()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Remove all rows except `indices`; only rows that change their position are copied."""
        left, length = len(indices), self.get_seq_length()
        moved = (indices != torch.arange(left, device=indices.device)).nonzero()[:, 0]
        for x in (self.all_keys, self.all_values):
            x[moved, :, :length] = x[indices[moved], :, :length]
        self.all_keys, self.all_values = self.all_keys[:left], self.all_values[:left]
        self.keys, self.values = self.all_keys[:, :, :length], self.all_values[:, :, :length]


class _PartLayer(DynamicLayer):
    """A cache layer that copies the keys and values of some prompts into the layer of all prompts.

    The layer itself stores no keys or values, because they may be views that keep larger tensors in memory.

    Args:
        whole: the layer of all prompts.
        first: row of the first of these prompts in `whole`.
        copies: rows per prompt.
    """

    def __init__(self, whole: RoomyLayer, first: int, copies: int) -> None:
        super().__init__()
        self.whole, self.first, self.copies = whole, first, copies

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Copy the keys and values [B, heads, P, head size] into `whole`, and return them unchanged."""
        self.whole.put(key_states, value_states, self.first, self.copies)
        return key_states, value_states


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which `model` uses `grouped_attention`, if it has sdpa attention and GQA.

    GQA (grouped-query attention): several query heads share keys and values. Other models are not changed.
    """
    try:
        heads = getattr(model.config, "num_attention_heads", None)
        shared = getattr(model.config, "num_key_value_heads", heads) != heads
    except RuntimeError:  # of a config whose layers have different numbers of heads
        shared = False
    with attention_of(model, GROUPED) if shared and forward.takes_any_mask(model) else nullcontext():
        yield


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which the blocks of `model` run compiled code.

    On a GPU with Triton, a model with sdpa attention also uses the kernel of `rlhf.generators.hf.kernel`.

    Raises:
        NoBlocks: the model has no blocks that can be compiled.
    """
    kernel = model.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    attention = attention_of(model, KERNEL) if kernel and forward.takes_any_mask(model) else nullcontext()
    with attention, forward.compiled_blocks(model).used():
        yield


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, Q, heads, D] of a model whose heads may share keys and values (GQA).

    Heads that share keys are computed as several queries of one head. The sdpa function of transformers
    would instead repeat all keys and values of the cache at every step if there is a mask.

    Args:
        module: the attention module.
        query: [B, heads, Q, D].
        key: [B, key heads, S, D].
        value: [B, key heads, S, D].
        attention_mask: [B, 1, Q, S] additive; with another mask, the sdpa function of transformers is used.
        scaling: factor of the scores; None: 1 / sqrt(D).
        kernel: whether the kernel of `rlhf.generators.hf.kernel` computes what it can.
        kwargs: further arguments of the attention interface of transformers.
    """
    heads, shared, count = query.shape[1], key.shape[1], query.shape[2]
    if attention_mask is None or attention_mask.shape[1] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kernel:
        from rlhf.generators.hf.kernel import attend, fits  # it imports Triton

        if fits(query, key, value):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return attend(query.to(key.dtype), key, value, attention_mask, scale), None
    output = scaled_dot_product_attention(
        query.reshape(len(query), shared, heads // shared * count, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, heads // shared, 1),
        scale=scaling,
    )
    return output.reshape(len(query), heads, count, -1).transpose(1, 2).contiguous(), None


for _name, _attention in ((GROUPED, grouped_attention), (KERNEL, partial(grouped_attention, kernel=True))):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, sdpa_mask)


# Decoding steps as CUDA graphs: a step is recorded once, then replayed with a single launch.
#
# A decoding step computes one token per row, which is little work. Launching its hundreds of operations one
# by one takes the CPU ten times as long as the GPU needs to execute them. A graph repeats the operations on
# the same memory, so every tensor that a step reads or writes must keep its address. Each step computes
# attention over all cache slots that its graph may fill, and the mask excludes the slots that are still
# empty. Rows that have ended stay in the batch until the next graph.


STEPS = 128  # steps of one graph; before the next graph, ended rows are removed and the cache grows
_REFUSED: WeakSet[PreTrainedModel] = WeakSet()  # models whose recording failed; it is tried once per model
_LOOK = 16  # steps between checks whether any row is running; at a check the CPU waits for the GPU


class GraphStep(Step):
    """A `Step` that runs as a CUDA graph.

    For a given set of rows, the first call runs normally, the second call is recorded, and later calls are
    replayed. The layers of the cache must be `RoomyLayer`, and the mask must be additive and have a column
    for every slot of the layers. If a model cannot be recorded (it reads a number on the CPU, or asks for the
    length of the cache), the step runs as a plain `Step`. If there is too little memory for a graph, the
    steps of these rows run as plain steps, and later batches are recorded again.
    """

    blocks: Callable[[], AbstractContextManager[None]] = nullcontext  # context of the forward passes
    fits = True  # False: there was too little memory for a graph
    left = 0  # steps left until the end of the graph
    replay: Callable[[], tuple[Tensor, Tensor]] | None = None
    fresh = True  # no step of the current graph has run yet

    @property
    def recordable(self) -> bool:
        """Return True unless the recording of this model or of these rows has failed."""
        return self.fits and self.model not in _REFUSED

    @property
    def layers(self) -> list[RoomyLayer]:
        """Return the layers of the cache."""
        return [layer for layer in self.cache.layers if isinstance(layer, RoomyLayer)]

    @property
    def settled(self) -> bool:  # type: ignore[override]
        """Return True if rows may be removed, which is the case only between two graphs."""
        return not (self.recordable and self.left)

    def looks(self, t: int) -> bool:
        """Return True every `_LOOK` steps and between graphs; a check at every step would be slow."""
        return self.settled or t % _LOOK == 0

    def keep(self, rows: Tensor) -> None:
        """End the graph, and remove all rows of the batch except `rows` [B']."""
        self.free()
        super().keep(rows)

    def free(self) -> None:
        """End the graph, so that the cache grows with every step again."""
        self.left, self.replay = 0, None
        for layer in self.layers:
            layer.free(self.length)

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, G]; the arguments are those of `Step.__call__`."""
        if self.recordable:
            try:
                return self.fixed(token, place, numbers)
            except (RuntimeError, _LengthAsked) as error:
                self.free()
                # The end of an interrupted recording raises an error of its own, whose context is the cause
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
                    cause = cause.__context__
                if cause is not None:
                    self.fits = False
                    log.warning(
                        "too little memory for a CUDA graph of %d rows; this batch is slower", len(token)
                    )
                else:
                    _REFUSED.add(self.model)
                    log.warning("decoding is not recorded as a CUDA graph and is slower: %s", error)
            torch.cuda.empty_cache()  # after the handler, which keeps the memory of the failed step alive
        return super().__call__(token, place, numbers)

    def fixed(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens and their log-probs [B, G], computed in the fixed tensors of a graph.

        Raises:
            RuntimeError, LengthAsked: the model cannot be recorded.
        """
        if not self.left:
            self.begin(token, place, numbers)
        end = self.length + self.group
        self.seen[..., self.length : end] = self.mask[..., self.length : end]
        for fixed, given in zip(self.inputs, (token, place, numbers), strict=True):
            fixed.copy_(given)
        if self.replay is not None:
            outputs = self.replay()
        elif self.fresh:
            self.fresh, outputs = False, self.run()
        else:
            self.replay = record(self.run)
            outputs = self.replay()
        self.slots += self.group
        self.length, self.left = end, self.left - 1
        return outputs[0].clone(), outputs[1].clone()

    def begin(self, token: Tensor, place: Tensor, numbers: Tensor) -> None:
        """Create the fixed tensors of the next graph: inputs, mask, cache slots and cache length."""
        self.free()
        room = self.mask.shape[-1]
        self.left = min(STEPS, (room - self.length) // self.group)
        until = min(room, -(-(self.length + self.left * self.group) // forward.ALIGNED) * forward.ALIGNED)
        self.seen = self.mask[..., :until].clone(memory_format=torch.contiguous_format)
        self.seen[..., self.length :] = -torch.inf
        self.inputs = [x.clone(memory_format=torch.contiguous_format) for x in (token, place, numbers)]
        self.slots = torch.arange(self.length, self.length + self.group, device=token.device)
        self.fresh = True
        for layer in self.layers:
            layer.fix(self.slots, until)

    def run(self) -> tuple[Tensor, Tensor]:
        """Run one step on the fixed tensors: the operations that a graph records."""
        token, place, numbers = self.inputs
        with self.blocks() if len(token) > 1 else nullcontext():  # code for one row would be compiled apart
            return self.choose(self.logits(token, place, self.seen), numbers=numbers)


def can_record(device: torch.device) -> bool:
    """Return True if operations on `device` can be recorded as CUDA graphs."""
    return device.type == "cuda"


def record(run: Callable[[], T]) -> Callable[[], T]:
    """Record `run` as a graph and return a function that replays the graph.

    Every call of the function returns the same tensor objects, with new values.
    """
    graph, side = torch.cuda.CUDAGraph(), _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU meanwhile
        try:
            outputs = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of `device` on which graphs are recorded.

    The stream is reused for all graphs, so that only one workspace for matrix products is allocated.
    """
    return torch.cuda.Stream(device)
