"""Log-probabilities of given tokens from hidden states, without storing all logits `[rows, vocabulary]`.

    logits = hidden @ weight.T + bias                         # [R, V], in the dtype of the forward
    logp   = (logits / temperature).log_softmax(-1)[target]   # float32

On request, two numbers of each row's distribution p = softmax(logits / temperature) are computed in the same
tiles (`EXTRAS`):

    entropy         = - sum_v p_v log p_v                     # differentiable
    log_sum_squares = log sum_v p_v^2                         # without gradient

R rows, H hidden size, V vocabulary size. The logits are computed in tiles of a few rows and a few vocabulary
entries, and the log-sum-exp of each row is accumulated over the tiles. Between forward and backward, only the
log-sum-exp of each row is stored. The backward pass computes each tile again and replaces the logits of the
tile by their gradient in place, `(onehot - p) / temperature * grad`. The gradient of the entropy with respect
to `logits / temperature` is `-p (log p + entropy)`.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009, section 4.
The kernels of the paper fuse the two matrix products of a tile. Here the two products are separate.

On a CPU a tile fits in the cache of a core. With a vocabulary of 50,304 and 848 rows, a forward with these
tiles took half the time of a forward with chunks of 64 MiB. Most of the difference is the time in which the
operating system clears the memory pages of every new chunk.

On a GPU the tiles are large, and what surrounds the matrix products of a tile reads and writes it many times.
With `compiled`, the compiler of torch makes one kernel of these operations in the forward pass and one in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.models.forward import product_dtype

_entr = torch.special.entr  # -x log(x), 0 at 0

_Tile = tuple[int, int]  # rows, vocabulary entries

CPU_TILE_BYTES = 2**21  # bytes of logits in a tile: a tile fits in the cache of a core
GPU_TILE_BYTES = 2**29  # bytes of logits in a tile: about 1,000 rows with a vocabulary of 128k
_MIN_TILE_VOCABULARY = 512  # fewest vocabulary entries of a tile; narrower matrix products are slow

EXTRAS = frozenset({"entropy", "log_sum_squares"})  # outputs that are computed only on request


class TokenOutputs(NamedTuple):  # a tuple, because DeepSpeed adds hooks to the tensors of a tuple
    """Results for R rows, float32 (float64 for float64 inputs). An output that was not requested is None."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None = None  # [R], in nats
    log_sum_squares: Tensor | None = None  # [R], without gradient
    divergence: Tensor | None = None  # [R], from a teacher; the head computes it


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    tile: _Tile | None = None,
    extras: Collection[str] = (),
    float32: bool = False,
    compiled: bool = False,
) -> TokenOutputs:
    """Return the log-probabilities of `targets` under `softmax((hidden @ weight.T + bias) / temperature)`.

    The results are differentiable in hidden, weight and bias, except `log_sum_squares`. Gradients are
    computed only for inputs that require gradients. The matrix products run in the autocast dtype if autocast
    is active, else in the dtype of `hidden`; with `float32`, in float32. The softmax runs in float32.

    Args:
        hidden: hidden states [R, H].
        weight: output embeddings [V, H].
        bias: output bias [V], or None.
        targets: token ids [R] int64.
        temperature: divisor of the logits.
        tile: rows and vocabulary entries computed at a time; None: 2 MiB of logits (512 MiB on a GPU).
        extras: names from `EXTRAS`: outputs that are computed besides the log-probs.
        float32: whether the matrix products run in float32 also for 16-bit inputs.
        compiled: whether the rest of a tile is compiled. Not with extras or a bias that requires a gradient.
    """
    assert EXTRAS.issuperset(extras), extras
    dtype = product_dtype(hidden.device, hidden.dtype)
    if float32:
        dtype = _accumulator(dtype)
    tile = tile or tile_for(hidden, weight, dtype)
    compiled = compiled and not extras and not (bias is not None and bias.requires_grad)
    if compiled:  # the compiler knows the number of columns, which is that of the vocabulary
        tile = max(1, tile[0] * tile[1] // len(weight)), len(weight)
    given = hidden, weight, bias, targets, temperature
    return TokenOutputs(*_TokenFunction.apply(*given, tile, dtype, frozenset(extras), compiled))


def tile_for(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> _Tile:
    """Return rows and vocabulary entries of a tile whose logits fit in the memory bound of the device.

    The tile has all rows of `hidden` if all rows and `_MIN_TILE_VOCABULARY` vocabulary entries fit.
    """
    bound = CPU_TILE_BYTES if weight.device.type == "cpu" else GPU_TILE_BYTES
    numbers = bound // _accumulator(dtype).itemsize
    entries = min(len(weight), max(_MIN_TILE_VOCABULARY, numbers // max(1, len(hidden))))
    return max(1, numbers // entries), entries


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums for products in `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _TokenFunction(torch.autograd.Function):
    """The autograd function of `token_outputs`, which documents the arguments and the results."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: _Tile,
        dtype: torch.dtype,
        extras: frozenset[str],
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the fields of `TokenOutputs`; store the inputs, and log-sum-exp and entropy of each row."""
        norms = torch.full((len(hidden), 1), -torch.inf, dtype=_accumulator(dtype), device=hidden.device)
        chosen = torch.zeros_like(norms)
        entropies = torch.zeros_like(norms) if "entropy" in extras else None
        squares = torch.zeros_like(norms) if "log_sum_squares" in extras else None
        with torch.autocast(hidden.device.type, enabled=False):
            for entries in _spans(len(weight), tile[1]):
                head, offset = weight[entries].to(dtype), None if bias is None else bias[entries]
                for rows in _spans(len(hidden), tile[0]):
                    part = hidden[rows].to(dtype)
                    if compiled:
                        given = part @ head.T, offset, temperature, targets[rows, None]
                        chosen[rows], norms[rows] = _run_compiled(_tile_summary, *given)
                        continue
                    logits = _tile_logits(part, head, offset, temperature)
                    column, inside = _within(targets[rows, None], entries)
                    chosen[rows] = torch.where(inside, logits.gather(-1, column), chosen[rows])
                    norm = torch.logaddexp(norms[rows], logits.logsumexp(-1, keepdim=True))
                    if extras:
                        finite = norm.clamp(min=torch.finfo(norm.dtype).min)  # -inf: all logits are -inf
                        earlier = (norms[rows] - finite).exp_()  # probability of the earlier tiles
                        probs = logits.sub_(finite).exp_()
                        if entropies is not None:
                            entropies[rows] = earlier * entropies[rows] + _entr(earlier) + total(_entr(probs))
                        if squares is not None:
                            squares[rows] = earlier.square() * squares[rows] + total(probs.square())
                    norms[rows] = norm
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.temperature, ctx.tile, ctx.dtype, ctx.compiled = temperature, tile, dtype, compiled
        entropy = None if entropies is None else entropies[:, 0].clone()
        log_sum_squares = None if squares is None else squares[:, 0].log()
        if log_sum_squares is not None:
            ctx.mark_non_differentiable(log_sum_squares)
        return (chosen - norms)[:, 0], entropy, log_sum_squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias; the logits of each tile are computed again."""
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        dtype = ctx.dtype
        scale = (grad.to(norms.dtype) / ctx.temperature)[:, None]
        if entropies is not None:
            assert grad_entropy is not None
            entropy_scale = (grad_entropy.to(norms.dtype) / ctx.temperature)[:, None]
        # The sums over tiles are float32 even if the products are bfloat16.
        grads = [
            torch.zeros_like(x, dtype=norms.dtype) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        grad_hidden, grad_weight, grad_bias = grads
        with torch.autocast(hidden.device.type, enabled=False):
            for entries in _spans(len(weight), ctx.tile[1]):
                head, offset = weight[entries].to(dtype), None if bias is None else bias[entries]
                for rows in _spans(len(hidden), ctx.tile[0]):
                    part = hidden[rows].to(dtype)
                    if ctx.compiled:
                        given = part @ head.T, offset, ctx.temperature, targets[rows, None], norms[rows]
                        slope = _run_compiled(_tile_slopes, *given, scale[rows])
                    else:
                        slope = _tile_logits(part, head, offset, ctx.temperature).sub_(norms[rows]).exp_()
                        if entropies is not None:  # -p (log p + entropy); slope is p
                            entropy_slope = _entr(slope).addcmul_(slope, entropies[rows], value=-1)
                            entropy_slope.mul_(entropy_scale[rows])
                        column, inside = _within(targets[rows, None], entries)
                        slope.scatter_add_(-1, column, -inside.to(slope.dtype))
                        slope.mul_(-scale[rows])
                        if entropies is not None:
                            slope.add_(entropy_slope)
                            del entropy_slope  # frees a tile before the next one is computed
                        if grad_bias is not None:
                            grad_bias[entries] += slope.sum(0)
                        slope = slope.to(dtype)
                    if grad_hidden is not None:
                        _add_product(grad_hidden[rows], slope, head)
                    if grad_weight is not None:
                        _add_product(grad_weight[entries], slope.T, part)
        inputs = zip(grads, (hidden, weight, bias), strict=True)
        return *(None if slope is None else slope.to(x.dtype) for slope, x in inputs), *(None,) * 6


def _run_compiled(
    function: Callable[..., Any], products: Tensor, bias: Tensor | None, temperature: float, *given: Tensor
) -> Any:
    """Return `function(products, bias, rate, *given)` by code that is compiled for any number of rows.

    Args:
        function: `_tile_summary` or `_tile_slopes`.
        products: products of hidden states and output embeddings [rows, V].
        bias: bias [V], or None.
        temperature: divisor of the logits; the rate is 1 / temperature [], in the dtype of the softmax.
        given: further arguments.
    """
    torch._dynamo.mark_static(products, 1)
    rate = torch.full((), 1 / temperature, dtype=_accumulator(products.dtype), device=products.device)
    return _compiled(function)(products, bias, rate, *given)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _tile_summary(
    products: Tensor, bias: Tensor | None, rate: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of the targets and the log-sum-exp [rows, 1] of a tile, given targets [rows, 1]."""
    logits = _logits(products, bias, rate)
    return logits.gather(-1, targets), logits.logsumexp(-1, keepdim=True)


def _tile_slopes(
    products: Tensor, bias: Tensor | None, rate: Tensor, targets: Tensor, norms: Tensor, scale: Tensor
) -> Tensor:
    """Return the gradient of the products [rows, V] of a tile, in their dtype.

    Args:
        products: products of hidden states and output embeddings [rows, V].
        bias: bias [V], or None.
        rate: 1 / temperature [].
        targets: token ids [rows, 1].
        norms: log-sum-exp [rows, 1].
        scale: gradient of each log-prob, divided by the temperature [rows, 1].
    """
    probs = (_logits(products, bias, rate) - norms).exp()
    chosen = torch.arange(products.shape[1], device=products.device) == targets
    return ((chosen.to(probs.dtype) - probs) * scale).to(products.dtype)


def _logits(products: Tensor, bias: Tensor | None, rate: Tensor) -> Tensor:
    if bias is not None:
        products = products + bias.to(products.dtype)
    return products.to(rate.dtype) * rate


def _tile_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return logits / temperature of a tile [rows, vocabulary entries] in float32, in a new buffer."""
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(_accumulator(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def total(x: Tensor) -> Tensor:
    """Return the sums over the vocabulary entries of a tile [rows, 1]."""
    return x.sum(-1, keepdim=True)


def _within(targets: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each target in the vocabulary slice `entries`, and whether the slice contains it.

    The column of a target outside the slice is valid but meaningless.
    """
    offset = targets - entries.start
    column = offset.clamp(0, entries.stop - entries.start - 1)
    return column, column == offset


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in place; `total` may have a wider dtype.

    The product in the narrower dtype is computed in parts of at most the size of `left`.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    for rows in _spans(len(left), max(1, left.numel() // total.shape[1])):
        total[rows] += left[rows] @ right


def _spans(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of `step` elements that cover `length` elements; the last may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


# Log-probabilities of given tokens with the fused linear cross-entropy of Liger Kernel.
#
# The results are those of `rlhf.models.logprobs`, for rows without extra outputs. Like the tiles there, Liger
# computes the logits of some rows at a time, and again in the backward pass. One Triton kernel replaces the
# operations on the elements of a tile.
#
# Three things differ. Hidden states are divided by the temperature before the product, not the logits after
# it. The gradient of the weight is added up in float32 and then rounded once to the dtype of the product.
# Liger waits for the GPU in each call, because the number of rows to count is read on the CPU.
#
# Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv 2410.10989.


def fused_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> Tensor:
    """Return the log-probs of `targets` under `softmax((hidden @ weight.T + bias) / temperature)`.

    The result, [R] float32, is differentiable in hidden, weight and bias.

    Args:
        hidden: hidden states [R, H], R > 0.
        weight: output embeddings [V, H].
        bias: output bias [V], or None.
        targets: token ids [R] int64.
        temperature: divisor of the logits.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype = product_dtype(hidden.device, hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = liger_fused_linear_cross_entropy(
            (hidden.float() / temperature).to(dtype),
            weight.to(dtype),
            targets,
            bias=None if bias is None else (bias.float() / temperature).to(dtype),
            reduction="none",
            accum_dtype=torch.float32,
        )
    return -loss
