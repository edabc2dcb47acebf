"""A Triton kernel for the attention of a decoding step: a few queries per row, all keys of the cache.

The time of a decoding step's attention is that of reading keys and values. The kernel reads them once, and
only the slots from the first to the last one that the mask lets a row see: neither the padding in front of a
short prompt nor the slots that are still empty. Softmax is computed while reading (Dao et al., arXiv
2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2**13  # bytes of the keys that a program reads per step; the values of a step are as many
SEARCH = 1024  # slots of the mask per step of the search for the first and the last slot
MOST_QUERIES, LARGEST_HEAD = 64, 256  # queries per head of keys, and features of a head


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernel computes this attention in the registers and the memory of one program."""
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    return key.shape == value.shape and queries <= MOST_QUERIES and key.shape[-1] <= LARGEST_HEAD


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, mask, output, scale, slots,
    query_row, query_head, query_token, key_row, key_head, key_slot, value_row, value_head, value_slot,
    mask_row, mask_token, mask_slot, output_row, output_head, output_token,
    COUNT: tl.constexpr, SHARING: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr,
    FEATURES: tl.constexpr, STEP: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one row and of the query heads that share one head of keys."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    places = tl.arange(0, QUERIES)
    own, token = head * SHARING + places // COUNT, places % COUNT
    real = places < COUNT * SHARING
    mask += row * mask_row
    first, end = slots, 0
    for start in range(0, slots, SEARCH):
        at = start + tl.arange(0, SEARCH)
        for t in range(COUNT):
            seen = tl.load(mask + t * mask_token + at * mask_slot, at < slots, -float("inf"))
            seen = seen > -float("inf")
            first = tl.minimum(first, tl.min(tl.where(seen, at, slots)))
            end = tl.maximum(end, tl.max(tl.where(seen, at + 1, 0)))
    feature = tl.arange(0, FEATURES)
    inside = feature < SIZE
    q = tl.load(
        query + row * query_row + own[:, None] * query_head + token[:, None] * query_token + feature[None],
        real[:, None] & inside[None], 0.0,
    )  # fmt: skip
    keys = key + row * key_row + head * key_head + feature[None]
    values = value + row * value_row + head * value_head + feature[None]
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, FEATURES], tl.float32)
    for start in range(first // STEP * STEP, end, STEP):
        at = start + tl.arange(0, STEP)
        k = tl.load(keys + at[:, None] * key_slot, (at < end)[:, None] & inside[None], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores += tl.load(
            mask + token[:, None] * mask_token + at[None] * mask_slot,
            real[:, None] & (at < end)[None], -float("inf"),
        ).to(tl.float32)  # fmt: skip
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(most - base)
        v = tl.load(values + at[:, None] * value_slot, (at < end)[:, None] & inside[None], 0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        most = higher
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = output + row * output_row + own[:, None] * output_head + token[:, None] * output_token
    tl.store(to + feature[None], sums.to(output.dtype.element_ty), real[:, None] & inside[None])


@torch.library.custom_op("rlhf::decoding_attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention outputs [B, Q, heads, D] of Q queries per row.

    Args:
        query: [B, heads, Q, D], with adjacent features; the heads that share keys are adjacent.
        key: [B, key heads, S, D], in the dtype of `query`, with adjacent features.
        value: [B, key heads, S, D], as the keys.
        mask: additive mask [B, 1, Q, S].
        scale: factor of the scores.
    """
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "features must be adjacent"
    rows, heads, count, size = query.shape
    shared, slots = key.shape[1:3]
    output = query.new_empty(rows, count, heads, size)
    features = max(16, triton.next_power_of_2(size))
    _attend[(rows, shared)](
        query, key, value, mask, output, scale, slots,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        mask.stride(0), *mask.stride()[2:], output.stride(0), output.stride(2), output.stride(1),
        COUNT=count, SHARING=heads // shared, SIZE=size,
        QUERIES=max(16, triton.next_power_of_2(count * heads // shared)), FEATURES=features,
        STEP=max(16, TILE // (features * key.element_size())), SEARCH=SEARCH, num_warps=4, num_stages=3,
    )  # fmt: skip
    return output


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    rows, heads, count, size = query.shape
    return query.new_empty(rows, count, heads, size)
