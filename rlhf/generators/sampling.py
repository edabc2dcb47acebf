"""Sampling from a Hugging Face causal LM: one lean decode loop, and tokens that depend on a row's own numbers
alone.

A token is chosen by inverting the cumulative distribution at a given uniform number, so a row's tokens do not
depend on which rows share its batch, on their order, or on the rank that decodes it (to float rounding of the
logits).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.forward import plain, positions
from rlhf.seeding import derive


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


@torch.inference_mode()
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample K responses for each prompt.

    prompt_ids and prompt_mask [N, P] are padded left; uniforms [N, K, response_length], one number a token.
    Returns response_ids [N, K, T] int64 padded right with `pad_id`, response_mask [N, K, T], logprobs [N, K,
    T] float32 at `temperature` (0 at padding) and ended [N, K]: a token of `stop_ids` was sampled; it belongs
    to the response. T is the longest response. Each prompt is encoded once, and its cache repeated; rows that
    have ended leave the batch.
    """
    n, k, device = len(prompt_ids), samples_per_prompt, prompt_ids.device
    stops = torch.as_tensor(sorted(stop_ids) if not isinstance(stop_ids, Tensor) else stop_ids, device=device)
    numbers = uniforms.reshape(n * k, response_length).to(device)
    tokens = torch.full((n * k, response_length), pad_id, device=device)
    mask = torch.zeros(n * k, response_length, dtype=torch.bool, device=device)
    logprobs = torch.zeros(n * k, response_length, device=device)
    ended = torch.zeros(n * k, dtype=torch.bool, device=device)

    cache = DynamicCache(config=model.config)
    repeatable = plain(cache)
    ids = prompt_ids.masked_fill(~prompt_mask, 0)
    seen = prompt_mask
    if not repeatable:
        ids, seen = ids.repeat_interleave(k, 0), seen.repeat_interleave(k, 0)
    place = positions(seen)
    logits = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=place,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    if repeatable:
        cache.batch_repeat_interleave(k)
        logits, seen, place = (x.repeat_interleave(k, 0) for x in (logits, seen, place))
    rows = torch.arange(n * k, device=device)  # rows of the outputs that are still decoded
    place = place[:, -1:]
    length = 0
    while True:
        token, logprob = choose(logits[:, -1], temperature, numbers[rows, length])
        running = ~ended[rows]
        tokens[rows, length] = torch.where(running, token, pad_id)
        logprobs[rows, length] = torch.where(running, logprob, 0.0)
        mask[rows, length] = running
        ended[rows] |= running & torch.isin(token, stops)
        length += 1
        running = ~ended[rows]
        left = int(running.sum())
        if not left or length == response_length:
            break
        if repeatable and left * 2 < len(rows):
            cache.batch_select_indices(running.nonzero()[:, 0])
            rows, token, seen, place = rows[running], token[running], seen[running], place[running]
        place = place + 1
        seen = torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
        logits = model(
            input_ids=token[:, None],
            attention_mask=seen,
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
        ).logits
    shape = (n, k, length)
    return (
        tokens[:, :length].reshape(shape),
        mask[:, :length].reshape(shape),
        logprobs[:, :length].reshape(shape),
        ended.view(n, k),
    )


def choose(logits: Tensor, temperature: float, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] at the quantiles `numbers` [B] of `softmax(logits / temperature)`, logits [B, V], and their
    log-probs [B] float32."""
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)  # a float32 sum would starve the last of 50k words
    token = torch.searchsorted(cdf, (numbers * cdf[:, -1])[:, None], right=True).clamp_(
        max=logits.shape[-1] - 1
    )
    return token[:, 0], logp.gather(-1, token)[:, 0]
