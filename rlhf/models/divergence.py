"""The divergence between the next-token distributions of a policy s and a teacher t, over the vocabulary.

    beta = 1       KL(s || t) = sum_v s_v (log s_v - log t_v)      reverse: seeks a mode of the teacher
    beta = 0       KL(t || s)                                      forward: covers the teacher
    0 < beta < 1   beta KL(t || m) + (1 - beta) KL(s || m),        m = beta t + (1 - beta) s

The last row is the generalized Jensen-Shannon divergence (Agarwal et al., arXiv 2306.13649, equation 1).
It tends to 0, not to a KL, as beta goes to 0 or 1; both ends are the two KLs by convention.

With `top`, both distributions are cut to candidates, the `top` most probable tokens of the teacher, and one
bucket for all others. This is what a served teacher can give, and a lower bound of the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf.models.logprobs import CPU_TILE_BYTES, GPU_TILE_BYTES

Logits = Callable[[Tensor], Tensor]  # hidden states [R, H] -> logits / temperature [R, V]
# The same of a teacher; or row numbers [R] -> ids and log-probs [R, C] of candidates
Target = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence [R] of log-probs [R, V] (-inf: no token), differentiable in `student`."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    lowest = torch.finfo(student.dtype).min / 4  # not -inf, so that 0 log 0 and its gradient are 0
    student, teacher = student.clamp(min=lowest), teacher.clamp(min=lowest)
    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def with_rest(logprobs: Tensor) -> Tensor:
    """Return log-probs [R, C + 1]: those [R, C] of some tokens, and that of all other tokens together."""
    inside = logprobs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, torch.log(-torch.expm1(inside))], -1)


def tiled_divergence(
    student: Logits, hidden: Tensor, teacher: Target, states: Tensor, beta: float, top: int | None = None
) -> Tensor:
    """Return the divergence [R] of R rows, given their hidden states.

    The logits are computed in tiles of a few rows, in the backward pass again, so that no logits [R, V] are
    stored.

    Args:
        student: the head of the policy; gradients reach its parameters and `hidden`.
        hidden: hidden states [R, H] of the policy.
        teacher: the head of the teacher, or its candidates, which take the place of `top`.
        states: what `teacher` is called with: hidden states [R, H] of the teacher, or row numbers [R].
        beta: which divergence.
        top: tokens to which the distributions are cut; None: the whole vocabulary.
    """

    def tile(hidden: Tensor, states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = student(hidden).to(dtype).log_softmax(-1)
        with torch.no_grad():
            theirs = teacher(states)
        if isinstance(theirs, tuple):  # -inf: the tokenizer lacks the candidate
            ours = logprobs.gather(-1, theirs[0]).masked_fill(theirs[1].isneginf(), -torch.inf)
            return divergence(with_rest(ours), with_rest(theirs[1].to(dtype)), beta)
        theirs = theirs.to(dtype).log_softmax(-1)
        shared = min(logprobs.shape[-1], theirs.shape[-1])  # ids of the wider model alone have no token
        logprobs, theirs = logprobs[:, :shared], theirs[:, :shared]
        if top is not None and top < shared:
            chosen = theirs.topk(top).indices
            logprobs, theirs = with_rest(logprobs.gather(-1, chosen)), with_rest(theirs.gather(-1, chosen))
        return divergence(logprobs, theirs, beta)

    if not len(hidden):
        return hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
    with torch.no_grad():
        width = student(hidden[:1]).shape[-1]
    # Six to ten arrays of a tile live at a time: on a GPU, a quarter of the tile of log-probs needs as much.
    rows = max(1, (CPU_TILE_BYTES if hidden.device.type == "cpu" else GPU_TILE_BYTES // 4) // (4 * width))
    tiles = zip(hidden.split(rows), states.split(rows), strict=True)
    return torch.cat([checkpoint(tile, *each, use_reentrant=False) for each in tiles])
