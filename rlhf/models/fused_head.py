"""Log-probabilities of given tokens with the fused linear cross-entropy of Liger Kernel.

The results are those of `rlhf.models.logprobs`, for rows without extra outputs. Like the tiles there, Liger
computes the logits of some rows at a time, and again in the backward pass. One Triton kernel replaces the
operations on the elements of a tile.

Three things differ. Hidden states are divided by the temperature before the product, not the logits after it.
The gradient of the weight is added up in float32 and then rounded once to the dtype of the product. Liger
waits for the GPU in each call, because the number of rows to count is read on the CPU.

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv 2410.10989.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.models.precision import product_dtype


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
