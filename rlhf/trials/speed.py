"""Trials before a run: whether compiled blocks and Liger's head save time."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.models import Dtype
from rlhf.core.batch import Batch
from rlhf.engines.engine import trained
from rlhf.memory.plan import with_token_limit
from rlhf.memory.sizes import most_sequences
from rlhf.models.forward import raise_errors
from rlhf.models.logprobs import fused_logprobs, token_outputs
from rlhf.models.modules import LogprobHead, RolloutModule, described
from rlhf.models.placement import autocast, shared_copies
from rlhf.terminal.console import say_row
from rlhf.trials.trial import REPEATS, Trial, example, fastest, largest_difference, parts, reject, timed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks


# The trial of compiled blocks (`backend.compile`): a micro-batch of the longest sequences, and half of one.
#
# With `backend.compile=null`, only a GPU compiles, and only if the time that compiled blocks save in the run
# exceeds the time of the compilation.


WORTH_TRYING_S = 600.0  # seconds; a run that trains for less time starts no trial, which takes minutes
# Largest differences of outputs (relative to 1 + |output|) and of gradients (relative to their norm). In 16
# bits, compiled blocks round less often. A wrong mask or layout changes gradients by about their norm.
_LIMITS = {Dtype.float32: (1e-3, 1e-3), Dtype.bfloat16: (1.0, 0.1), Dtype.float16: (0.3, 0.03)}


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
    batches = [_example(engine, cfg, each) for each in (prompts, -(-prompts // 2))]
    with timed(ranks.device):
        usual_s = max(ranks.gather(run(engine, batches[0])[2]))
        if asked is None and usual_s * left < WORTH_TRYING_S:
            return
        raise_errors(True)
        trial = _largest([compare(engine, batch) for batch in batches])
    trial = _largest(ranks.gather(trial))
    times = f"{trial.times()}, compiled in {trial.preparation_s:.0f} s"
    if (found := fault(trial, engine.settings.dtype)) is not None:
        reject("backend.compile", asked, found, "blocks are not compiled")
    elif asked or trial.pays_off(left):
        _use(engine)
        raise_errors(False)
        say_row("compiled blocks", f"yes; {trial.differences('output')}; {times}")
    else:
        say_row("compiled blocks", f"no, too little gain in {left} micro-batches: {times}")


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `backend.compile=null` starts a trial: on a GPU, if the backend can compile."""
    return device.type == "cuda" and cfg.backend.compiles


def work(cfg: Config, ranks: Ranks, updates: int) -> tuple[int, int]:
    """Return the prompts of a micro-batch of the longest sequences, and the micro-batches of `updates`."""
    share = -(-cfg.schedule.prompts_per_update // (cfg.schedule.minibatches * ranks.size))  # of a minibatch
    prompts = max(1, min(share, most_sequences(with_token_limit(cfg)) // cfg.algo.samples_per_prompt))
    return prompts, updates * cfg.schedule.epochs * cfg.schedule.minibatches * -(-share // prompts)


def _example(engine: Engine, cfg: Config, prompts: int) -> Batch:
    """Return a batch of random tokens, of the largest lengths of the run."""
    samples, device = cfg.algo.samples_per_prompt, engine.ranks.device
    asked = torch.ones(prompts, cfg.task.max_prompt_tokens, dtype=torch.bool)
    answered = torch.ones(prompts, samples, cfg.generator.response_length, dtype=torch.bool)
    rollouts = example(engine.module.model, asked, answered, device)
    return rollouts.extend(Batch, scores=torch.zeros(prompts, samples, device=device))


def compare(engine: Engine, batch: Batch) -> Trial:
    """Return times and differences of a micro-batch with the usual and with compiled blocks."""
    expected, usual_gradients, usual_s = run(engine, batch)
    start = time.perf_counter()
    try:
        _use(engine)
        found, gradients, compiled_s = run(engine, batch)
    except (RuntimeError, OSError, ImportError) as error:  # of the compiler, or of a program that it starts
        return Trial(usual_s=usual_s, error=described(error))
    finally:
        _use(engine, False)
        engine.discard()
    change = torch.stack([(a - b).norm() for a, b in zip(gradients, usual_gradients, strict=True)]).norm()
    norm = torch.stack([each.norm() for each in usual_gradients]).norm()
    return Trial(
        usual_s=usual_s,
        faster_s=compiled_s,
        preparation_s=max(0.0, time.perf_counter() - start - REPEATS * compiled_s),
        outputs=largest_difference(found, expected),
        gradients=float((change / norm).nan_to_num(math.inf)),
    )


def fault(trial: Trial, dtype: Dtype) -> str | None:
    """Return why compiled blocks cannot be used in `dtype`; None: they can."""
    if trial.error:
        return f"the blocks cannot be compiled: {trial.error}"
    right = trial.right(_LIMITS[dtype])
    return None if right else f"compiled blocks give wrong results: {trial.differences('output')}"


def _use(engine: Engine, compiled: bool = True) -> None:
    for module in parts(engine, RolloutModule):
        module.use_compiled(compiled)


def run(engine: Engine, batch: Batch) -> tuple[list[Tensor], list[Tensor], float]:
    """Run the trained module forward and backward, and the reference forward.

    Returns:
        The outputs of both models, the gradients, and the seconds of a run.
    """
    device, dtype = engine.ranks.device, engine.settings.dtype

    def train() -> list[Tensor]:
        outputs = [x for x in engine.forward(batch) if x is not None]
        # The root keeps gradients near 1 for any number of tokens: float16 neither overflows nor underflows.
        torch.stack([x.sum() / math.sqrt(x.numel()) for x in outputs]).sum().backward()
        return [x.detach() for x in outputs]

    def refer() -> list[Tensor]:
        assert engine.reference is not None
        with torch.no_grad(), autocast(device, dtype):
            return [x for x in engine.reference(batch) if x is not None]

    with shared_copies(device, dtype):
        outputs, seconds = fastest(train, device)
    gradients = _take_gradients(engine)
    if engine.reference is None:
        return outputs, gradients, seconds
    more, more_s = fastest(refer, device)
    return outputs + more, gradients, seconds + more_s


def _take_gradients(engine: Engine) -> list[Tensor]:
    """Return the gradients of the trained parameters, 0 without a gradient, and delete them."""
    found = []
    for parameter in trained(engine.module):
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return found


def _largest(trials: list[Trial]) -> Trial:
    """Return the largest value of each field; an error is larger than none."""
    return Trial(**{each.name: max(getattr(trial, each.name) for trial in trials) for each in fields(Trial)})


# The trial of Liger's kernel for the heads of policies (`model.fused_head`).
#
# The weight of the head and random hidden states of one micro-batch give log-probs and gradients, by the
# tiles of `rlhf.models.logprobs` and by Liger (`rlhf.models.logprobs`).
#
# With `model.fused_head=null`, only a GPU uses Liger, and only where Liger is installed and faster.


_LIGER = "liger_kernel"  # the package
# Largest difference of a log-prob, relative to 1 + |log-prob|, and of a gradient, relative to its norm. Older
# versions of Liger give gradients of tokens with different weights that differ by about their norm.
_HEAD_LIMITS = (5e-2, 5e-2)

_Logprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]


def choose_head(engine: Engine, cfg: Config) -> None:
    """Let the heads of the engine's policies use Liger if `model.fused_head` and a trial allow.

    Args:
        engine: the engine of the run, before the first update.
        cfg: the config of the run.

    Raises:
        UserError: `model.fused_head=true`, and Liger fails or gives wrong results.
    """
    asked, ranks = cfg.model.fused_head, engine.ranks
    heads = parts(engine, LogprobHead)
    if not heads or not (asked or (asked is None and head_may_pay_off(cfg, ranks.device))):
        return
    rows = most_sequences(with_token_limit(cfg)) * cfg.generator.response_length
    with timed(ranks.device):
        trial = compare_heads(heads[0], rows, cfg.generator.temperature, ranks.device, engine.settings.dtype)
    trial = ranks.gather(trial)[0]  # the result of the first rank counts
    if (found := head_fault(trial)) is not None:
        reject("model.fused_head", asked, found, "the head uses tiles")
    elif asked or trial.pays_off():
        for head in heads:
            head.fused = True
        say_row("head", f"Liger; {summary(trial)}")
    else:
        say_row("head", f"tiles, Liger is not faster: {summary(trial)}")


def head_may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `model.fused_head=null` starts a trial."""
    return (
        device.type == "cuda"
        and cfg.model.dtype is not Dtype.float32
        and not cfg.model.float32_head
        and not cfg.backend.footprint().gathered
        and importlib.util.find_spec(_LIGER) is not None
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

    def run(logprobs: _Logprobs) -> tuple[list[Tensor], float]:
        def step() -> list[Tensor]:
            weight = head.weight.detach().requires_grad_(head.weight.requires_grad)
            hidden = states.detach().requires_grad_()
            with autocast(device, dtype):
                output = logprobs(hidden, weight, head.offset(), targets, temperature)
            output.backward(slopes)
            return [x for x in (output.detach(), hidden.grad, weight.grad) if x is not None]

        return fastest(step, device)

    expected, tiles_s = run(lambda *given: token_outputs(*given).logprobs)
    try:
        found, fused_s = run(fused_logprobs)
    except Exception as error:  # Triton and the code of Liger may raise anything
        return Trial(error=described(error))
    changes = [(a - b).norm() / b.norm() for a, b in zip(found[1:], expected[1:], strict=True)]
    return Trial(
        usual_s=tiles_s,
        faster_s=fused_s,
        outputs=largest_difference(found[:1], expected[:1]),
        gradients=float(torch.stack(changes).max().nan_to_num(torch.inf)),
    )


def head_fault(trial: Trial) -> str | None:
    """Return why Liger cannot be used; None: it can."""
    if trial.error:
        return f"Liger fails: {trial.error}"
    return None if trial.right(_HEAD_LIMITS) else f"Liger gives wrong results: {summary(trial)}"


def summary(trial: Trial) -> str:
    """Return the measured differences and times as text."""
    return f"{trial.differences('log-prob')}; {trial.times()}"
