"""Log-probabilities of chosen tokens from hidden states, without ever holding `[tokens, vocabulary]`.

    logits = hidden @ weight.T + bias                     # [R, V], in the dtype of the forward
    logp   = (logits / temperature).log_softmax(-1)[target]   # float32

R rows, H hidden size, V vocabulary. Rows go through in chunks whose logits fit a memory bound. What is kept
for the backward is one number a row, the log of the normaliser; the logits are computed again and turned into
their gradient in place, `(onehot - p) / temperature * grad` (Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models", arXiv 2411.09009, section 4; the kernels there fuse what is done here with
two matrix products a chunk).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNK_BYTES = 2**26  # 64 MiB of logits: nothing is gained above it
GPU_CHUNK_BYTES = 2**29  # a GPU wants a thousand rows a matrix product, also with 128k words


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk: int | None = None,
) -> Tensor:
    """Log-probabilities of `targets` under `softmax((hidden @ weight.T + bias) / temperature)`.

    hidden [R, H], weight [V, H], bias [V] or None, targets [R] int64; returns [R] float32 (float64 for
    float64 inputs). Differentiable in hidden, weight and bias; what needs no gradient costs none. The matrix
    products run in the autocast dtype where autocast is on, else in the dtype of `hidden`; the softmax always
    in float32. `chunk` is the number of rows at once; None: as many as fit 64 MiB of logits (512 MiB on a
    GPU).
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    result: Tensor = TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, chunk or rows_at_once(weight, dtype), dtype
    )
    return result


def rows_at_once(weight: Tensor, dtype: torch.dtype) -> int:
    """How many rows' logits over the vocabulary of `weight` [V, H] fit the memory bound."""
    bound = CPU_CHUNK_BYTES if weight.device.type == "cpu" else GPU_CHUNK_BYTES
    return max(1, bound // (weight.shape[0] * accumulator(dtype).itemsize))


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
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Keep the normaliser of each row, not its logits."""
        logps = torch.empty(len(hidden), dtype=accumulator(dtype), device=hidden.device)
        norms = torch.empty_like(logps)
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(dtype)
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                logits = chunk_logits(hidden[rows].to(dtype), cast, bias, temperature)
                norms[rows] = logits.logsumexp(-1)
                logps[rows] = logits.gather(-1, targets[rows, None])[:, 0] - norms[rows]
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Per chunk: logits again, their gradient in place, one product to each input."""
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = ctx.dtype
        scale = grad.to(norms.dtype) / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over chunks in float32 also where the products are in bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=norms.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(dtype)
            for start in range(0, len(hidden), ctx.chunk):
                rows = slice(start, start + ctx.chunk)
                part = hidden[rows].to(dtype)
                logits = chunk_logits(part, cast, bias, ctx.temperature)
                slope = (
                    logits.sub_(norms[rows, None]).exp_().mul_(-scale[rows, None])
                )  # -p * grad / temperature
                slope.scatter_add_(-1, targets[rows, None], scale[rows, None])
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
                slope = slope.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = slope @ cast
                if grad_weight is not None:
                    if dtype == grad_weight.dtype:
                        grad_weight.addmm_(slope.T, part)
                    else:
                        grad_weight += slope.T @ part
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits / temperature [rows, V] in float32, in their own buffer; inputs in the dtype of the products."""
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias.to(logits.dtype)
    return logits.to(accumulator(logits.dtype)).div_(temperature)
