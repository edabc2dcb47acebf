"""Figures of stage 7 about kernels with alternatives: the head, attention, and 16-bit copies of weights."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlhf.config.model import Dtype
from rlhf.core.batch import Rollouts
from rlhf.engines import engine as engine_module
from rlhf.models import flash_attention
from rlhf.models.fused_head import fused_logprobs
from rlhf.models.logprobs import token_outputs
from rlhf.models.modules import Policy
from rlhf.models.precision import autocast, product_dtype
from tests.gpu.report import Report, Skip
from tests.gpu.shapes import batch, large, shape_of

REPEATS = 3


def dtype_of(report: Report) -> Dtype:
    """Return the dtype of the measured forwards."""
    return Dtype.bfloat16 if report.gpu else Dtype.float32


def milliseconds(report: Report, step: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of `REPEATS` calls, after a call that loads kernels."""
    found = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        step()
        if report.gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found[1:])


def by_torch(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float) -> Tensor:
    """Return log-probs by the chunks of torch, in the dtype of the products."""
    from torch.nn.functional import linear_cross_entropy  # not in torch 2.11

    options = torch.nn.LinearCrossEntropyOptions()
    dtype = product_dtype(hidden.device, hidden.dtype)
    given: Any = (hidden / temperature).to(dtype), weight.to(dtype), targets
    return -linear_cross_entropy(*given, reduction="none", options=options).float()


def heads(report: Report) -> None:
    """Measure log-probs and gradients of one micro-batch with tiles, with torch's chunks and with Liger."""
    kernels = {"tiles": lambda *given: token_outputs(*given).logprobs}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        kernels["torch"] = by_torch
    if report.gpu and importlib.util.find_spec("liger_kernel") is not None:
        kernels["Liger"] = fused_logprobs
    shape, rows = shape_of(report.gpu), 8192 if report.gpu else 64
    hidden = torch.randn(rows, shape.hidden_size, device=report.device, requires_grad=True)
    weight = (
        torch.randn(shape.vocabulary, shape.hidden_size, device=report.device).mul_(0.02).requires_grad_()
    )
    targets = torch.randint(0, shape.vocabulary, (rows,), device=report.device)
    slopes = torch.randn(rows, device=report.device)
    for name, logprobs in kernels.items():

        def step(logprobs: Callable[..., Tensor] = logprobs) -> None:
            hidden.grad = weight.grad = None
            with autocast(report.device, dtype_of(report)):
                output = logprobs(hidden, weight, None, targets, 0.7)
            output.backward(slopes)

        report.figure(f"head, {rows} rows, {name}", milliseconds(report, step), "ms")


def attentions(report: Report) -> None:
    """Measure forward and backward behind encoded prompts, with sdpa and with flash attention."""
    kinds = ["sdpa", flash_attention.installed(report.device, dtype_of(report))]
    count, prompt, response = (32, 384, 128) if report.gpu else (4, 24, 8)
    rollouts: Rollouts = batch(count, 2, prompt, response, shape_of(report.gpu).vocabulary)
    for row in range(count):  # different lengths, so that masks have padding
        rollouts.prompt_mask[row, : row * prompt // (2 * count)] = False
    rollouts = rollouts.to(report.device)
    for kind in filter(None, kinds):
        policy = Policy(large(report.gpu, report.device, torch.float32), 1.0, shared_prefix=True)
        policy.always_apart = True
        policy.model.set_attn_implementation(kind)

        def step(policy: Policy = policy) -> None:
            policy.zero_grad()
            with autocast(report.device, dtype_of(report)):
                output = policy(rollouts).logprobs
            output.sum().backward()

        report.figure(f"forward and backward, {kind}", milliseconds(report, step), "ms")
        del policy
    if kinds[1] is None:
        raise Skip("needs a GPU and flash-attn")


def copies(report: Report, engine: Any, objective: Any, given: Any) -> None:
    """Measure a step of 8 micro-batches that share 16-bit copies of weights, and one that does not."""
    alone = milliseconds(report, lambda: engine.step(given, objective))
    with patch.object(engine_module, "shared_copies", lambda *_: nullcontext()):
        repeated = milliseconds(report, lambda: engine.step(given, objective))
    report.figure("step of 8 micro-batches, shared copies of weights", alone, "ms")
    report.figure("step of 8 micro-batches, copies in every micro-batch", repeated, "ms")
