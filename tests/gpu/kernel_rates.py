"""Figures of stage 7 about kernels with alternatives: the head, attention, and 16-bit copies of weights."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlhf.config.models import Dtype
from rlhf.core.batch import Rollouts
from rlhf.engines import engine as engine_module
from rlhf.models import forward
from rlhf.models.forward import autocast, product_dtype
from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import Policy
from tests.gpu.report import NO_GPU, Report, Skip
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


@contextmanager
def roomy() -> Iterator[None]:
    """Skip the rest of the part if the memory of the GPU is too small for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Skip(f"too little memory: {error}"[:100]) from error


def by_tiles(
    hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float, compiled: bool = False
) -> Tensor:
    """Return log-probs by the tiles of `rlhf.models.logprobs`; `compiled`: as with `backend.compile`."""
    if compiled and hidden.device.type != "cuda":
        raise Skip(NO_GPU)
    return token_outputs(hidden, weight, bias, targets, temperature, compiled=compiled).logprobs


def by_torch(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float) -> Tensor:
    """Return log-probs by the chunks of torch, in the dtype of the products."""
    try:
        from torch.nn import LinearCrossEntropyOptions
        from torch.nn.functional import linear_cross_entropy
    except ImportError as missing:  # torch 2.11
        raise Skip(f"needs a newer torch with linear_cross_entropy, got {torch.__version__}") from missing
    dtype = product_dtype(hidden.device, hidden.dtype)
    given: Any = (hidden / temperature).to(dtype), weight.to(dtype), targets
    return -linear_cross_entropy(*given, reduction="none", options=LinearCrossEntropyOptions()).float()


def by_liger(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, temperature: float) -> Tensor:
    """Return log-probs by Liger's head."""
    if hidden.device.type != "cuda":
        raise Skip(NO_GPU)
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skip("needs liger-kernel")
    return fused_logprobs(hidden, weight, bias, targets, temperature)


def heads(report: Report) -> None:
    """Measure log-probs and gradients of one micro-batch with each kind of head."""
    shape, rows = shape_of(report.full), 8192 if report.full else 64
    hidden = torch.randn(rows, shape.hidden_size, device=report.device, requires_grad=True)
    weight = (
        torch.randn(shape.vocabulary, shape.hidden_size, device=report.device).mul_(0.02).requires_grad_()
    )
    targets = torch.randint(0, shape.vocabulary, (rows,), device=report.device)
    slopes = torch.randn(rows, device=report.device)
    compiled = partial(by_tiles, compiled=True)
    kernels = {"tiles": by_tiles, "compiled": compiled, "torch": by_torch, "Liger": by_liger}
    for kernel, logprobs in kernels.items():

        def step(logprobs: Callable[..., Tensor] = logprobs) -> None:
            hidden.grad = weight.grad = None
            with autocast(report.device, dtype_of(report)):
                output = logprobs(hidden, weight, None, targets, 0.7)
            output.backward(slopes)

        name = f"head, {rows} rows, {kernel}"
        with report.part(name), roomy():
            report.figure(name, milliseconds(report, step), "ms")


def attentions(report: Report) -> None:
    """Measure forward and backward behind encoded prompts, with sdpa and with flash attention."""
    kinds = ["sdpa", forward.installed(report.device, dtype_of(report))]
    count, prompt, response = (32, 384, 128) if report.full else (4, 24, 8)
    rollouts: Rollouts = batch(count, 2, prompt, response, shape_of(report.full).vocabulary)
    for row in range(count):  # different lengths, so that masks have padding
        rollouts.prompt_mask[row, : row * prompt // (2 * count)] = False
    rollouts = rollouts.to(report.device)
    for kind in filter(None, kinds):
        policy = Policy(large(report.full, report.device, torch.float32), 1.0, shared_prefix=True)
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
