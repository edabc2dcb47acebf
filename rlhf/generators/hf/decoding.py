"""Forwards of decoding with a Hugging Face causal LM: prompts into a key-value cache, then one token a sample
after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.models.precision import product_dtype
from rlhf.models.shared_prefix import positions, takes_any_mask

TOKENS = {"cpu": 2**12, "cuda": 2**14}  # of prompts that are encoded at once: enough to fill a device


GROUPED = "sdpa_grouped"  # the name of `grouped_attention` in transformers


def encode(
    model: PreTrainedModel, ids: Tensor, seen: Tensor, layers: list[RoomyLayer], copies: int
) -> Tensor:
    """Logits [B * copies, 1, V] after prompts `ids` and `seen` [B, P]; `layers` get their keys and values,
    `copies` times each.

    Some prompts a forward, trimmed to the longest of them: less is wasted where they come by length.
    """
    found, tokens = [], TOKENS[ids.device.type]
    for rows in torch.arange(len(ids), device=ids.device).split(max(1, tokens // ids.shape[1])):
        mask = seen[rows, -int(seen[rows].sum(1).max()) :]
        parts: list[Any] = [PartLayer(layer, int(rows[0]) * copies, copies) for layer in layers]
        logits = model(
            input_ids=ids[rows, -mask.shape[1] :],
            attention_mask=mask,
            position_ids=positions(mask),
            past_key_values=Cache(layers=parts),
            use_cache=True,
            # An index, not 1, which gives the head a view: it would go through its weights once a row.
            logits_to_keep=torch.tensor([mask.shape[1] - 1], device=ids.device),
        ).logits
        found.append(logits.repeat_interleave(copies, 0))
    return torch.cat(found)


def attention(seen: Tensor, group: int, room: int) -> Tensor:
    """What the tokens of one decoding step attend to, for prompts `seen` [B, P] and all steps to come, G
    samples a row, which take turns in the `room` of the cache: [B, 1, G, P + room], the prompt and every G-th
    token after it.
    """
    own = torch.eye(group, dtype=torch.bool, device=seen.device).repeat(1, -(-room // group))[:, :room]
    return torch.cat([seen[:, None].expand(-1, group, -1), own.expand(len(seen), -1, -1)], 2)[:, None]


class Step:
    """One token more for each sample: a forward, and a choice from the logits that it gives.

    Args:
        model, cache: what is decoded with; the cache has the tokens before.
        mask: of all steps to come, of which each is given what it attends to: additive [B, 1, G, S], or
            [B, S] with True for tokens.
        group: samples a row, G.
        choose: tokens and log-probs [B, G] of logits [B, G, V] and `numbers` [B, G].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        mask: Tensor,
        group: int,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        self.model = model
        self.cache = cache
        self.mask = mask
        self.group = group
        self.choose = choose

    def __call__(self, token: Tensor, place: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs [B, G] after `token` at positions `place`, at the quantiles `numbers`."""
        seen = self.mask[..., : self.cache.get_seq_length() + self.group]
        return self.choose(
            self.logits(token, place, seen), numbers=numbers
        )  # they go before the next are made

    def logits(self, token: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """The forward: [B, G, V]."""
        found: Tensor = self.model(
            input_ids=token,
            attention_mask=seen,
            position_ids=place,
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return found

    @property
    def settled(self) -> bool:
        """Whether rows may leave."""
        return True

    def looks(self, t: int) -> bool:
        """Whether to look, before step `t`, which rows go on."""
        return True

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows `rows` [B'] alone."""
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


class LengthAsked(Exception):
    """A model asks for the length of a cache that has a fixed one."""


class RoomyLayer(DynamicLayer):
    """A cache layer with room for all tokens: a step writes its own in place, the others stay.

    Under autocast it keeps what attention would make of keys and values: those in the dtype of its products.

    Args:
        rows: of the batch.
        prompt: tokens of the longest prompt.
        room: tokens that there is room for after the prompt.
    """

    def __init__(self, rows: int, prompt: int, room: int) -> None:
        super().__init__()
        self.rows, self.prompt, self.room = rows, prompt, room
        self.slots: Tensor | None = None

    def put(self, keys: Tensor, values: Tensor, first: int, copies: int) -> None:
        """Keys and values [B, heads, P, head size] of prompts, for the B * copies rows from `first` on.

        What shorter prompts leave of the room is 0: a mask takes away the weight of what is there, but a NaN
        would stay one.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            length = self.prompt + self.room
            self.all_keys, self.all_values = (
                x.new_empty(self.rows, x.shape[1], length, x.shape[3], dtype=product_dtype(x.device, x.dtype))
                for x in (keys, values)
            )
            self.keys, self.values = (x[:, :, : self.prompt] for x in (self.all_keys, self.all_values))
        rows, start = slice(first, first + len(keys) * copies), self.prompt - keys.shape[2]
        for whole, part in ((self.all_keys, keys), (self.all_values, values)):
            whole[rows, :, :start] = 0
            whole[rows, :, start : self.prompt].unflatten(0, (-1, copies)).copy_(part[:, None])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, head size]; returns all so far, or up to the length that is
        fixed, as views."""
        if self.slots is not None:
            for whole, new in ((self.all_keys, key_states), (self.all_values, value_states)):
                whole.index_copy_(2, self.slots, new.to(whole.dtype))
            return self.all_keys[:, :, : self.until], self.all_values[:, :, : self.until]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        self.all_keys[:, :, start:end] = key_states
        self.all_values[:, :, start:end] = value_states
        self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
        return self.keys, self.values

    def fix(self, slots: Tensor, until: int) -> None:
        """Write to the places `slots` [S] from here on, whatever they are then, and give what is before
        `until`: nothing depends on the number of tokens that are there. What no token has been written to is
        0."""
        start = self.get_seq_length()
        for x in (self.all_keys, self.all_values):
            x[:, :, start:until] = 0
        self.slots, self.until = slots, until

    def free(self, length: int) -> None:
        """Grow again, behind `length` tokens."""
        self.slots = None
        self.keys, self.values = self.all_keys[:, :, :length], self.all_values[:, :, :length]

    def get_seq_length(self) -> int:
        """Tokens so far.

        Raises:
            LengthAsked: they are not known, for it is fixed.
        """
        if self.slots is not None:
            raise LengthAsked("the model asks for the length of the cache")
        return super().get_seq_length()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`; only those are copied whose place changes."""
        left, length = len(indices), self.get_seq_length()
        moved = (indices != torch.arange(left, device=indices.device)).nonzero()[:, 0]
        for x in (self.all_keys, self.all_values):
            x[moved, :, :length] = x[indices[moved], :, :length]
        self.all_keys, self.all_values = self.all_keys[:left], self.all_values[:left]
        self.keys, self.values = self.all_keys[:, :, :length], self.all_values[:, :, :length]


class PartLayer(DynamicLayer):
    """Puts the keys and values of some prompts into `whole`. It keeps none: they can be views of more."""

    def __init__(self, whole: RoomyLayer, first: int, copies: int) -> None:
        super().__init__()
        self.whole, self.first, self.copies = whole, first, copies

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, P, head size] as they are."""
        self.whole.put(key_states, value_states, self.first, self.copies)
        return key_states, value_states


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Have a model with sdpa whose heads share keys and values (GQA) attend with `grouped_attention`."""
    before = model.config._attn_implementation
    heads = getattr(model.config, "num_attention_heads", None)
    if not takes_any_mask(model) or getattr(model.config, "num_key_value_heads", heads) == heads:
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, heads, Q, D] to key and value [B, key heads, S, D] under a mask [B, 1, Q, S]:
    [B, Q, heads, D].

    The heads that share a key are queries of one head. sdpa of transformers, given a mask, repeats all keys
    and values of the cache for them instead, at every step.
    """
    heads, shared, count = query.shape[1], key.shape[1], query.shape[2]
    if attention_mask is None or attention_mask.shape[1] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    found = scaled_dot_product_attention(
        query.reshape(len(query), shared, heads // shared * count, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, heads // shared, 1),
        scale=scaling,
    )
    return found.reshape(len(query), heads, count, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


AttentionMaskInterface.register(GROUPED, sdpa_mask)
