"""Sampling from a Hugging Face causal LM: one lean decode loop, and tokens that depend on a row's own numbers
alone.

A token is chosen by inverting the cumulative distribution at a given uniform number, so a row's tokens do not
depend on which rows share its batch, on their order, or on the rank that decodes it (to float rounding of the
logits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from rlhf.core.seeding import derive
from rlhf.generators.hf.cuda_graph import GraphStep, can_record
from rlhf.generators.hf.decoding import RoomyLayer, Step, attention, encode, grouped
from rlhf.models import sharing_rules as sharing
from rlhf.models.shared_prefix import ALIGNED, additive, plain, positions, takes_any_mask

F = TypeVar("F", bound=Callable[..., Any])


CPU_CHUNK, GPU_CHUNK = 2**20, 2**24  # probabilities at once: on a CPU as many as its cache holds


BLOCK = 128  # words that are summed up before the running sum


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


def without_gradient(sample: F) -> F:
    """Inference mode, which spares small operations some time. Under autocast no more than no gradient: in
    inference mode it would make 16-bit weights anew in every forward, and here keeps them from the first."""

    @wraps(sample)
    def called(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        low = torch.is_autocast_enabled(model.device.type)
        with torch.no_grad() if low else torch.inference_mode():
            return sample(model, *args, **kwargs)

    return cast(F, called)


@without_gradient
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

    Each prompt is encoded once. Where attention takes any mask (sdpa), samples of a prompt share a row of the
    batch (`rlhf.sharing`), a token of each a step, and read one copy of the prompt's keys; else the cache is
    repeated. Rows that have ended leave the batch. On a GPU a step is a graph (`rlhf.generators.cuda_graph`).

    `before_forward` is called before the forwards of every step, the t-th time before those which give token
    t; it may change the model's weights. Keys and values of the tokens before stay those of the weights
    before.

    What is returned can be inference tensors: no backward pass can save them, but what is made of them.
    """
    n, k, device = len(prompt_ids), samples_per_prompt, prompt_ids.device
    stops = torch.as_tensor(list(stop_ids) if not isinstance(stop_ids, Tensor) else stop_ids, device=device)
    longest = int(prompt_mask.sum(1).max())
    seen = prompt_mask[:, -longest:]
    ids = prompt_ids[:, -longest:].masked_fill(~seen, 0)
    cache: Cache = (kinds := DynamicCache(config=model.config))
    movable = plain(kinds)  # its rows can be repeated and dropped
    masked = movable and takes_any_mask(model)
    group = sharing.in_decoding(k, longest, response_length) if masked else 1
    recorded = masked and can_record(device) and before_forward is None
    room = group * response_length
    if recorded:
        room += -(longest + room) % ALIGNED
    if before_forward is not None:
        before_forward()
    if movable:
        layers = [RoomyLayer(n * k // group, longest, room) for _ in kinds.layers]
        logits = encode(model, ids, seen, layers, k // group)
        cache, seen = Cache(layers=list(layers)), seen.repeat_interleave(k // group, 0)
    else:
        seen = seen.repeat_interleave(k, 0)
        logits = model(
            input_ids=ids.repeat_interleave(k, 0),
            attention_mask=seen,
            position_ids=positions(seen),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    place = positions(seen)[:, -1:].expand(-1, group)
    if masked:
        mask = additive(model, attention(seen, group, room))
    else:
        mask = torch.cat([seen, seen.new_ones(len(seen), response_length)], 1)
    kind = GraphStep if recorded else Step
    step = kind(model, cache, mask, group, partial(choose, temperature=temperature))

    shape = (len(seen), group, response_length)  # = [N*K/G, G, T], G samples in a row
    numbers = uniforms.reshape(shape).to(device)
    tokens = torch.full(shape, pad_id, device=device)
    logprobs = torch.zeros(shape, device=device)
    real = torch.zeros(shape, dtype=torch.bool, device=device)
    rows = torch.arange(len(seen), device=device)  # rows of the outputs that are still decoded
    running = torch.ones(shape[:2], dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []  # of `rows`, not written to the outputs yet
    token, logprob = choose(logits.expand(-1, group, -1), temperature, numbers[..., 0])
    del logits
    with grouped(model):
        for t in range(response_length):
            steps.append((token, logprob, running))
            running = running & ~torch.isin(token, stops)
            over = t + 1 == response_length
            if over or step.looks(t):
                going = running.any(1)
                left = int(going.sum())
                over, fewer = over or not left, movable and step.settled and left < len(rows)
                if over or fewer:
                    for whole, parts in zip((tokens, logprobs, real), zip(*steps, strict=True), strict=True):
                        whole[rows, :, t + 1 - len(steps) : t + 1] = torch.stack(parts, -1)
                    steps.clear()
                if over:
                    break
                if fewer:
                    kept = front(going)
                    step.keep(kept)
                    rows, token, running, place = (x[kept] for x in (rows, token, running, place))
            place = place + 1
            if before_forward is not None:
                before_forward()
            token, logprob = step(token, place, numbers[rows, :, t + 1])
    length = int(real.any(0).any(0).sum())
    tokens.masked_fill_(~real, pad_id)
    logprobs.masked_fill_(~real, 0.0)
    ended = (real & torch.isin(tokens, stops)).any(-1)
    return (
        tokens[..., :length].reshape(n, k, length),
        real[..., :length].reshape(n, k, length),
        logprobs[..., :length].reshape(n, k, length),
        ended.view(n, k),
    )


def front(going: Tensor) -> Tensor:
    """The rows of `going` [B] that are true, those at the end moved to where others have gone."""
    left = int(going.sum())
    kept = torch.arange(left, device=going.device)
    kept[~going[:left]] = left + going[left:].nonzero()[:, 0]
    return kept


def choose(logits: Tensor, temperature: float, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens at the quantiles `numbers` [...] of `softmax(logits / temperature)`, logits [..., V], and their
    log-probs [...] float32."""
    chunk = max(1, (CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // logits.shape[-1])
    tokens, chosen = [], []
    for some, own in zip(logits.flatten(0, -2).split(chunk), numbers.flatten().split(chunk), strict=True):
        some = some.float()
        probs = torch.softmax(some if temperature == 1 else some / temperature, -1)
        tokens.append(pick(probs, own))
        chosen.append(probs.gather(-1, tokens[-1]))
    return torch.cat(tokens).view_as(numbers), torch.cat(chosen).log_().view_as(numbers)


def pick(probs: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [B, 1] at the quantiles `numbers` [B] of `probs` [B, V].

    Of a large vocabulary first a block of words and then a word of it, so that only the sums of blocks are
    added up in float64; a running sum in float32 would starve the last of 50k words.
    """
    words = probs.shape[-1]
    if words <= 8 * BLOCK:
        return quantile(probs, numbers)[0]
    whole = words - words % BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    weights = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], -1)
    block, target, until = quantile(weights, numbers)
    own = weights.gather(-1, block)
    part = (target - until.gather(-1, block) + own) / own  # of the block's weight, which the number passes
    places = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probs.gather(-1, places.clamp(max=words - 1)).masked_fill_(places >= words, 0.0)
    within = quantile(inside, part[:, 0].clamp(0, 1 - 2**-53))[0]
    return (block * BLOCK + within).clamp_(max=words - 1)


def quantile(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the running sum of `weights` [B, S] passes the parts `numbers` [B] of the whole: the indices
    [B, 1], never one without weight, those parts [B, 1] and the running sum [B, S], both float64."""
    until = weights.cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * until[:, -1:]
    index = torch.searchsorted(until, target, right=True)
    return index.clamp_(max=weights.shape[1] - 1), target, until  # beyond it: NaN
