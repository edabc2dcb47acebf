"""Sampling from a Hugging Face causal LM: one lean decode loop, and tokens that depend on a row's own numbers
alone.

A token is chosen by inverting the cumulative distribution at a given uniform number, so a row's tokens do not
depend on which rows share its batch, on their order, or on the rank that decodes it (to float rounding of the
logits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rlhf.forward import plain, positions
from rlhf.seeding import derive

KEEP = 7 / 8  # dropping rows copies the cache: worth it, measured, where an eighth of the rows has ended


def uniforms(seed: int, request: int, index: Tensor, samples: int, length: int) -> Tensor:
    """Uniform numbers in [0, 1) for the examples `index` [N]: [N, samples, length] float64, on the CPU.

    An example's numbers depend on (seed, request, its index, length) only: a counter-based generator (Philox,
    Salmon et al. 2011) whose key is made of seed and request and whose counter starts at the index, so any
    slice of the examples, on any rank, gets the same. More samples leave those before as they are.
    """
    key = derive(seed, "sampling", request)
    rows = [
        np.random.Generator(np.random.Philox(key=key, counter=[0, i, 0, 0])).random((samples, length))
        for i in index.tolist()
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, samples, length, dtype=torch.float64)


@torch.no_grad()  # not inference_mode: what it makes could never be saved for a backward pass
def sample(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    samples_per_prompt: int,
    response_length: int,
    temperature: float,
    uniforms: Tensor,
    stop_ids: Iterable[int] | Tensor,
    pad_id: int,
    before_forward: Callable[[], object] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample K responses for each prompt.

    prompt_ids and prompt_mask [N, P] are padded left; uniforms [N, K, response_length], one number a token.
    Returns response_ids [N, K, T] int64 padded right with `pad_id`, response_mask [N, K, T], logprobs
    [N, K, T] float32 at `temperature` (0 at padding) and ended [N, K]: a token of `stop_ids` was sampled; it
    belongs to the response. T is the longest response.

    Each prompt is encoded once. Where attention takes any mask (sdpa), the K samples of a prompt stay one row
    of the batch, K tokens a step, and read one copy of the prompt's keys; else the cache is repeated. Rows
    that have ended leave the batch.

    `before_forward` is called before every forward, the t-th time before that which gives token t; it may
    change the model's weights. Keys and values of the tokens before stay those of the weights before.
    """
    n, k, device = len(prompt_ids), samples_per_prompt, prompt_ids.device
    stops = torch.as_tensor(list(stop_ids) if not isinstance(stop_ids, Tensor) else stop_ids, device=device)
    ids, seen = prompt_ids.masked_fill(~prompt_mask, 0), prompt_mask
    cache: Cache = (kinds := DynamicCache(config=model.config))
    movable = plain(kinds)  # its rows can be repeated and dropped
    shared = movable and takes_any_mask(model)
    group = k if shared else 1  # samples in a row of the batch
    if movable:
        room = prompt_ids.shape[1] + group * response_length
        cache = Cache(layers=[RoomyLayer(room) for _ in kinds.layers])
    else:
        ids, seen = ids.repeat_interleave(k, 0), seen.repeat_interleave(k, 0)
    place = positions(seen)
    if before_forward is not None:
        before_forward()
    logits = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=place,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    if movable and not shared:
        cache.batch_repeat_interleave(k)
        logits, seen, place = (x.repeat_interleave(k, 0) for x in (logits, seen, place))
    logits, place = logits.expand(-1, group, -1), place[:, -1:].expand(-1, group)
    mask = attention(seen, group, response_length)

    shape = (len(seen), group, response_length)  # = [N*K/G, G, T], G samples in a row
    numbers = uniforms.reshape(shape).to(device)
    tokens = torch.full(shape, pad_id, device=device)
    logprobs = torch.zeros(shape, device=device)
    real = torch.zeros(shape, dtype=torch.bool, device=device)
    rows = torch.arange(len(seen), device=device)  # rows of the outputs that are still decoded
    running = torch.ones(shape[:2], dtype=torch.bool, device=device)
    for t in range(response_length):
        token, logprob = choose(logits.flatten(0, 1), temperature, numbers[rows, :, t].flatten())
        token = token.view(running.shape)
        tokens[rows, :, t] = torch.where(running, token, pad_id)
        logprobs[rows, :, t] = torch.where(running, logprob.view(running.shape), 0.0)
        real[rows, :, t] = running
        running = running & ~torch.isin(token, stops)
        going = running.any(1)
        left = int(going.sum())
        if not left or t + 1 == response_length:
            break
        if movable and left < len(rows) * KEEP:
            cache.batch_select_indices(going.nonzero()[:, 0])
            rows, token, running, place, mask = (x[going] for x in (rows, token, running, place, mask))
        place = place + 1
        if before_forward is not None:
            before_forward()
        logits = model(
            input_ids=token,
            attention_mask=mask[..., : cache.get_seq_length() + group],
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
        ).logits
    length = t + 1
    ended = (real & torch.isin(tokens, stops)).any(-1)
    return (
        tokens[..., :length].reshape(n, k, length),
        real[..., :length].reshape(n, k, length),
        logprobs[..., :length].reshape(n, k, length),
        ended.view(n, k),
    )


def takes_any_mask(model: PreTrainedModel) -> bool:
    """Whether the model hands a mask [B, 1, Q, S] to attention as it is."""
    return model.is_backend_compatible() and model.config._attn_implementation == "sdpa"


def attention(seen: Tensor, group: int, length: int) -> Tensor:
    """What the tokens of one decoding step attend to, for prompts `seen` [B, P] and all steps to come.

    [B, P + length] for one sample a row. For G samples a row, which take turns in the cache,
    [B, 1, G, P + G * length]: the prompt, and every G-th token after it.
    """
    if group == 1:
        return torch.cat([seen, seen.new_ones(len(seen), length)], 1)
    own = torch.eye(group, dtype=torch.bool, device=seen.device).repeat(1, length)
    return torch.cat([seen[:, None].expand(-1, group, -1), own.expand(len(seen), -1, -1)], 2)[:, None]


class RoomyLayer(DynamicLayer):
    """A cache layer with room for `room` tokens: a step writes one token instead of copying all before it."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, head size]; returns all so far, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.fill(key_states, value_states)
        else:
            start = self.get_seq_length()
            end = start + key_states.shape[2]
            self.all_keys[:, :, start:end] = key_states
            self.all_values[:, :, start:end] = value_states
            self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Copy keys and values to the start of buffers with room."""
        length = keys.shape[2]
        self.all_keys, self.all_values = (
            x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in (keys, values)
        )
        self.keys, self.values = self.all_keys[:, :, :length], self.all_values[:, :, :length]
        self.keys.copy_(keys)
        self.values.copy_(values)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        assert self.keys is not None and self.values is not None
        self.fill(self.keys.repeat_interleave(repeats, 0), self.values.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        assert self.keys is not None and self.values is not None
        self.fill(self.keys[indices], self.values[indices])


def choose(logits: Tensor, temperature: float, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] at the quantiles `numbers` [B] of `softmax(logits / temperature)`, logits [B, V], and their
    log-probs [B] float32."""
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)  # a float32 sum would starve the last of 50k words
    token = torch.searchsorted(cdf, (numbers * cdf[:, -1])[:, None], right=True).clamp_(
        max=logits.shape[-1] - 1
    )
    return token[:, 0], logp.gather(-1, token)[:, 0]
