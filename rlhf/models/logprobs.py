"""Log-probabilities of chosen tokens from hidden states, without ever holding `[tokens, vocabulary]`.

    logits = hidden @ weight.T + bias                     # [R, V], in the dtype of the forward
    logp   = (logits / temperature).log_softmax(-1)[target]   # float32

R rows, H hidden size, V vocabulary. The logits are computed in tiles of some rows and some words, and the
logarithms of their normalisers are added up over the words. That is all that is kept for the backward, one
number a row; there a tile is computed again and turned into its gradient in place,
`(onehot - p) / temperature * grad` (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
arXiv 2411.09009, section 4; the kernels there fuse what is done here with two matrix products a tile).

On a CPU a tile stays in the cache of its core. With 50,304 words and 848 rows, that took half of a forward's
time with chunks of 64 MiB, most of it saved in the kernel, which clears the pages of every new chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.models.precision import product_dtype

Tile = tuple[int, int]  # rows, words


CPU_TILE_BYTES = 2**21  # of logits: they stay in the cache of a core


GPU_TILE_BYTES = 2**29  # a GPU wants a thousand rows a matrix product, also with 128k words


WORDS = 512  # that a tile has at least; with fewer the matrix products are slow


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    tile: Tile | None = None,
) -> Tensor:
    """Log-probabilities of `targets` under `softmax((hidden @ weight.T + bias) / temperature)`.

    hidden [R, H], weight [V, H], bias [V] or None, targets [R] int64; returns [R] float32 (float64 for
    float64 inputs). Differentiable in hidden, weight and bias; what needs no gradient costs none. The matrix
    products run in the autocast dtype where autocast is on, else in the dtype of `hidden`; the softmax always
    in float32. `tile` is how many rows and words are computed at once; None: 2 MiB of logits (512 MiB on a
    GPU).
    """
    dtype = product_dtype(hidden.device, hidden.dtype)
    result: Tensor = TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, tile or tile_for(hidden, weight, dtype), dtype
    )
    return result


def tile_for(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tile:
    """Rows and words of a tile within the memory bound: all rows, if that leaves enough words."""
    bound = CPU_TILE_BYTES if weight.device.type == "cpu" else GPU_TILE_BYTES
    numbers = bound // accumulator(dtype).itemsize
    words = min(len(weight), max(WORDS, numbers // max(1, len(hidden))))
    return max(1, numbers // words), words


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums for products in `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`."""

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
        """Keep the normaliser of each row, not its logits."""
        norms = torch.full((len(hidden), 1), -torch.inf, dtype=accumulator(dtype), device=hidden.device)
        chosen = torch.zeros_like(norms)
        with torch.autocast(hidden.device.type, enabled=False):
            for words in spans(len(weight), tile[1]):
                head, offset = weight[words].to(dtype), None if bias is None else bias[words]
                for rows in spans(len(hidden), tile[0]):
                    logits = tile_logits(hidden[rows].to(dtype), head, offset, temperature)
                    place, here = within(targets[rows, None], words)
                    chosen[rows] = torch.where(here, logits.gather(-1, place), chosen[rows])
                    norms[rows] = torch.logaddexp(norms[rows], logits.logsumexp(-1, keepdim=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.temperature, ctx.tile, ctx.dtype = temperature, tile, dtype
        return (chosen - norms)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Per tile: logits again, their gradient in place, one product to each input."""
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        dtype = ctx.dtype
        scale = (grad.to(norms.dtype) / ctx.temperature)[:, None]
        # Summed over tiles in float32 also where the products are in bfloat16.
        grads = [
            torch.zeros_like(x, dtype=norms.dtype) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        grad_hidden, grad_weight, grad_bias = grads
        with torch.autocast(hidden.device.type, enabled=False):
            for words in spans(len(weight), ctx.tile[1]):
                head, offset = weight[words].to(dtype), None if bias is None else bias[words]
                for rows in spans(len(hidden), ctx.tile[0]):
                    part = hidden[rows].to(dtype)
                    logits = tile_logits(part, head, offset, ctx.temperature)
                    slope = logits.sub_(norms[rows]).exp_()  # p
                    place, here = within(targets[rows, None], words)
                    slope.scatter_add_(-1, place, -here.to(slope.dtype))
                    slope.mul_(-scale[rows])
                    if grad_bias is not None:
                        grad_bias[words] += slope.sum(0)
                    slope = slope.to(dtype)
                    if grad_hidden is not None:
                        add_product(grad_hidden[rows], slope, head)
                    if grad_weight is not None:
                        add_product(grad_weight[words], slope.T, part)
        inputs = zip(grads, (hidden, weight, bias), strict=True)
        return *(None if slope is None else slope.to(x.dtype) for slope, x in inputs), None, None, None, None


def tile_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits / temperature [rows, words] in float32, in their own buffer."""
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(accumulator(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def within(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Where `targets` are among `words`, any place if they are not, and whether they are."""
    place = targets - words.start
    inside = place.clamp(0, words.stop - words.start - 1)
    return inside, inside == place


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def spans(length: int, step: int) -> Iterator[slice]:
    """Cut `length` into slices of `step`, the last one shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
