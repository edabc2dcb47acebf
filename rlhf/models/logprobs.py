"""Log-probabilities of given tokens from hidden states, without storing all logits `[rows, vocabulary]`.

    logits = hidden @ weight.T + bias                         # [R, V], in the dtype of the forward
    logp   = (logits / temperature).log_softmax(-1)[target]   # float32

R rows, H hidden size, V vocabulary size. The logits are computed in tiles of a few rows and a few vocabulary
entries, and the log-sum-exp of each row is accumulated over the tiles. Between forward and backward, only the
log-sum-exp of each row is stored. The backward pass computes each tile again and replaces the logits of the
tile by their gradient in place, `(onehot - p) / temperature * grad`.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009, section 4.
The kernels of the paper fuse the two matrix products of a tile. Here the two products are separate.

On a CPU a tile fits in the cache of a core. With a vocabulary of 50,304 and 848 rows, a forward with these
tiles took half the time of a forward with chunks of 64 MiB. Most of the difference is the time in which the
operating system clears the memory pages of every new chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.models.precision import product_dtype

Tile = tuple[int, int]  # rows, vocabulary entries

CPU_TILE_BYTES = 2**21  # bytes of logits in a tile: a tile fits in the cache of a core
GPU_TILE_BYTES = 2**29  # bytes of logits in a tile: about 1,000 rows with a vocabulary of 128k
MIN_TILE_VOCABULARY = 512  # fewest vocabulary entries of a tile; narrower matrix products are slow


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    tile: Tile | None = None,
) -> Tensor:
    """Return the log-probabilities of `targets` under `softmax((hidden @ weight.T + bias) / temperature)`.

    The result is differentiable in hidden, weight and bias; gradients are computed only for inputs that
    require gradients. The matrix products run in the autocast dtype if autocast is active, else in the dtype
    of `hidden`. The softmax runs in float32.

    Args:
        hidden: hidden states [R, H].
        weight: output embeddings [V, H].
        bias: output bias [V], or None.
        targets: token ids [R] int64.
        temperature: divisor of the logits.
        tile: rows and vocabulary entries computed at a time; None: 2 MiB of logits (512 MiB on a GPU).

    Returns:
        log-probs [R] float32 (float64 for float64 inputs).
    """
    dtype = product_dtype(hidden.device, hidden.dtype)
    result: Tensor = TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, tile or tile_for(hidden, weight, dtype), dtype
    )
    return result


def tile_for(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tile:
    """Return rows and vocabulary entries of a tile whose logits fit in the memory bound of the device.

    The tile has all rows of `hidden` if all rows and `MIN_TILE_VOCABULARY` vocabulary entries fit.
    """
    bound = CPU_TILE_BYTES if weight.device.type == "cpu" else GPU_TILE_BYTES
    numbers = bound // accumulator(dtype).itemsize
    entries = min(len(weight), max(MIN_TILE_VOCABULARY, numbers // max(1, len(hidden))))
    return max(1, numbers // entries), entries


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums for products in `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class TokenLogprobs(torch.autograd.Function):
    """The autograd function of `token_logprobs`, which documents the arguments and the result."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: Tile,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return log-probs [R]; store the inputs and each row's log-sum-exp for the backward pass."""
        norms = torch.full((len(hidden), 1), -torch.inf, dtype=accumulator(dtype), device=hidden.device)
        chosen = torch.zeros_like(norms)
        with torch.autocast(hidden.device.type, enabled=False):
            for entries in spans(len(weight), tile[1]):
                head, offset = weight[entries].to(dtype), None if bias is None else bias[entries]
                for rows in spans(len(hidden), tile[0]):
                    logits = tile_logits(hidden[rows].to(dtype), head, offset, temperature)
                    column, inside = within(targets[rows, None], entries)
                    chosen[rows] = torch.where(inside, logits.gather(-1, column), chosen[rows])
                    norms[rows] = torch.logaddexp(norms[rows], logits.logsumexp(-1, keepdim=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.temperature, ctx.tile, ctx.dtype = temperature, tile, dtype
        return (chosen - norms)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias; the logits of each tile are computed again."""
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        dtype = ctx.dtype
        scale = (grad.to(norms.dtype) / ctx.temperature)[:, None]
        # The sums over tiles are float32 even if the products are bfloat16.
        grads = [
            torch.zeros_like(x, dtype=norms.dtype) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        grad_hidden, grad_weight, grad_bias = grads
        with torch.autocast(hidden.device.type, enabled=False):
            for entries in spans(len(weight), ctx.tile[1]):
                head, offset = weight[entries].to(dtype), None if bias is None else bias[entries]
                for rows in spans(len(hidden), ctx.tile[0]):
                    part = hidden[rows].to(dtype)
                    logits = tile_logits(part, head, offset, ctx.temperature)
                    slope = logits.sub_(norms[rows]).exp_()  # p
                    column, inside = within(targets[rows, None], entries)
                    slope.scatter_add_(-1, column, -inside.to(slope.dtype))
                    slope.mul_(-scale[rows])
                    if grad_bias is not None:
                        grad_bias[entries] += slope.sum(0)
                    slope = slope.to(dtype)
                    if grad_hidden is not None:
                        add_product(grad_hidden[rows], slope, head)
                    if grad_weight is not None:
                        add_product(grad_weight[entries], slope.T, part)
        inputs = zip(grads, (hidden, weight, bias), strict=True)
        return *(None if slope is None else slope.to(x.dtype) for slope, x in inputs), None, None, None, None


def tile_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return logits / temperature of a tile [rows, vocabulary entries] in float32, in a new buffer."""
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(accumulator(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def within(targets: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each target in the vocabulary slice `entries`, and whether the slice contains it.

    The column of a target outside the slice is valid but meaningless.
    """
    offset = targets - entries.start
    column = offset.clamp(0, entries.stop - entries.start - 1)
    return column, column == offset


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in place; `total` may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def spans(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of `step` elements that cover `length` elements; the last may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
