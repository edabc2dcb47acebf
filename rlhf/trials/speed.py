"""Trials before a run: whether compiled blocks and Liger's head save time."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.models import Dtype
from rlhf.core.batch import Batch
from rlhf.engines.engine import trained
from rlhf.memory.plan import with_token_limit
from rlhf.memory.sizes import most_sequences
from rlhf.models.forward import autocast, raise_errors, shared_copies
from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import LogprobHead, RolloutModule
from rlhf.trials.trial import Measured, Trial, Way, example, fastest, parts, timed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks


# The trial of compiled blocks (`backend.compile`): a micro-batch of the longest sequences, and half of one.
#
# With `backend.compile=null`, only a GPU compiles, and only if the time that compiled blocks save in the run
# exceeds the time of the compilation.


WORTH_TRYING_S = 600.0  # seconds; a run that trains for less time starts no trial, which takes minutes
# In 16 bits, compiled blocks round less often. A wrong mask or layout changes gradients by about their norm.
_LIMITS = {Dtype.float32: (1e-3, 1e-3), Dtype.bfloat16: (1.0, 0.1), Dtype.float16: (0.3, 0.03)}
BLOCKS = Way("backend.compile", "compiled blocks", _LIMITS)


def compile_blocks(engine: Engine, cfg: Config, updates: int) -> None:
    """Compile the blocks of the models of `engine` if `backend.compile` and a trial allow; print the result.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.
        updates: updates of the whole run.

    Raises:
        UserError: `backend.compile=true`, and the blocks cannot be compiled or give wrong results.
    """
    asked, ranks = cfg.backend.compile, engine.ranks
    if not (asked or (asked is None and may_pay_off(cfg, ranks.device))):
        return
    prompts, left = work(cfg, ranks, updates)
    samples = cfg.algo.samples_per_prompt
    batches = []  # of random tokens, of the largest lengths of the run
    for count in (prompts, -(-prompts // 2)):
        asked_mask = torch.ones(count, cfg.task.max_prompt_tokens, dtype=torch.bool)
        answered = torch.ones(count, samples, cfg.generator.response_length, dtype=torch.bool)
        rollouts = example(engine.module.model, asked_mask, answered, ranks.device)
        batches.append(rollouts.extend(Batch, scores=torch.zeros(count, samples, device=ranks.device)))
    with timed(ranks.device):
        usual_s = max(ranks.gather(_trained(engine, batches[0]).seconds))
        if asked is None and usual_s * left < WORTH_TRYING_S:
            return
        raise_errors(True)
        trials = [compare(engine, batch) for batch in batches]
    # the largest value of each field; an error is larger than none
    trials = [each for own in ranks.gather(trials) for each in own]
    trial = Trial(**{each.name: max(getattr(x, each.name) for x in trials) for each in fields(Trial)})
    if BLOCKS.chosen(trial, engine.settings.dtype, asked, left):
        _use_compiled(engine, True)
        raise_errors(False)


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `backend.compile=null` starts a trial: on a GPU, if the backend can compile."""
    return device.type == "cuda" and cfg.backend.compiles


def work(cfg: Config, ranks: Ranks, updates: int) -> tuple[int, int]:
    """Return the prompts of a micro-batch of the longest sequences, and the micro-batches of `updates`."""
    share = -(-cfg.schedule.prompts_per_update // (cfg.schedule.minibatches * ranks.size))  # of a minibatch
    prompts = max(1, min(share, most_sequences(with_token_limit(cfg)) // cfg.algo.samples_per_prompt))
    return prompts, updates * cfg.schedule.epochs * cfg.schedule.minibatches * -(-share // prompts)


def compare(engine: Engine, batch: Batch) -> Trial:
    """Return times and differences of a micro-batch with the usual and with compiled blocks."""

    def compiled() -> Measured:
        try:
            _use_compiled(engine, True)
            return _trained(engine, batch)
        finally:
            _use_compiled(engine, False)
            engine.discard()

    # errors of the compiler, or of a program that it starts
    return Trial.of(lambda: _trained(engine, batch), compiled, RuntimeError, OSError, ImportError)


def _use_compiled(engine: Engine, compiled: bool) -> None:
    for module in parts(engine, RolloutModule):
        module.use_compiled(compiled)


def _trained(engine: Engine, batch: Batch) -> Measured:
    """Run the trained module forward and backward, and the reference forward; delete the gradients."""
    device, dtype = engine.ranks.device, engine.settings.dtype

    def train() -> list[Tensor]:
        outputs = [x for x in engine.forward(batch) if x is not None]
        # The root keeps gradients near 1 for any number of tokens: float16 neither overflows nor underflows.
        torch.stack([x.sum() / math.sqrt(x.numel()) for x in outputs]).sum().backward()
        return [x.detach() for x in outputs]

    def refer() -> list[Tensor]:
        if engine.reference is None:
            return []
        with torch.no_grad(), autocast(device, dtype):
            return [x for x in engine.reference(batch) if x is not None]

    with shared_copies(device, dtype):
        outputs, seconds = fastest(train, device)
    gradients = []
    for parameter in trained(engine.module):
        gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    more, more_s = fastest(refer, device)
    return Measured(outputs + more, [gradients], seconds + more_s)


# The trial of Liger's kernel for the heads of policies (`model.fused_head`).
#
# The weight of the head and random hidden states of one micro-batch give log-probs and gradients, by the
# tiles and by Liger (`rlhf.models.logprobs`).
#
# With `model.fused_head=null`, only a GPU uses Liger, and only where Liger is installed and faster.


# Older versions of Liger give gradients of tokens with different weights that differ by about their norm.
HEAD = Way("model.fused_head", "Liger's head", dict.fromkeys(Dtype, (5e-2, 5e-2)))

_Logprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]


def choose_head(engine: Engine, cfg: Config) -> None:
    """Let the heads of the engine's policies use Liger if `model.fused_head` and a trial allow.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.

    Raises:
        UserError: `model.fused_head=true`, and Liger fails or gives wrong results.
    """
    asked, ranks, dtype = cfg.model.fused_head, engine.ranks, engine.settings.dtype
    heads = parts(engine, LogprobHead)
    if not heads or not (asked or (asked is None and head_may_pay_off(cfg, ranks.device))):
        return
    rows = most_sequences(with_token_limit(cfg)) * cfg.generator.response_length
    with timed(ranks.device):
        trial = compare_heads(heads[0], rows, cfg.generator.temperature, ranks.device, dtype)
    trial = ranks.gather(trial)[0]  # the result of the first rank counts
    if HEAD.chosen(trial, dtype, asked, math.inf):  # Liger compiles in seconds, whatever the run
        for head in heads:
            head.fused = True


def head_may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `model.fused_head=null` starts a trial."""
    return (
        device.type == "cuda"
        and cfg.model.dtype is not Dtype.float32
        and not cfg.model.float32_head
        and not cfg.backend.footprint().gathered
        and importlib.util.find_spec("liger_kernel") is not None
    )


def compare_heads(
    head: LogprobHead, rows: int, temperature: float, device: torch.device, dtype: Dtype
) -> Trial:
    """Return times and differences of log-probs and gradients of `rows` rows with tiles and with Liger."""
    draw = torch.Generator(device).manual_seed(0)
    size, width = head.weight.shape
    states = torch.randn(rows, width, generator=draw, device=device)
    targets = torch.randint(0, size, (rows,), generator=draw, device=device)
    if head.absent is not None:  # the log-prob of an id without a token is -inf
        known = (~head.absent).nonzero()[:, 0].to(device)
        targets = known[targets % len(known)]
    slopes = torch.randn(rows, generator=draw, device=device)  # as advantages: a different one for each row

    def run(logprobs: _Logprobs) -> Measured:
        def step() -> list[Tensor]:
            weight = head.weight.detach().requires_grad_(head.weight.requires_grad)
            hidden = states.detach().requires_grad_()
            with autocast(device, dtype):
                output = logprobs(hidden, weight, head.offset(), targets, temperature)
            output.backward(slopes)
            return [x for x in (output.detach(), hidden.grad, weight.grad) if x is not None]

        (output, *gradients), seconds = fastest(step, device)
        return Measured([output], [[x] for x in gradients], seconds)

    usual = partial(run, lambda *given: token_outputs(*given).logprobs)
    return Trial.of(usual, partial(run, fused_logprobs), Exception)  # Triton and Liger may raise anything
