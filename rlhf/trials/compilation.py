"""The trial of compiled blocks (`backend.compile`): a micro-batch of the longest sequences, and half of one.

With `backend.compile=null`, only a GPU compiles, and only if the time that compiled blocks save in the run
exceeds the time of the compilation.
"""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.model import Dtype
from rlhf.core.batch import Batch
from rlhf.core.console import say_row
from rlhf.engines.engine import trained
from rlhf.memory.plan import with_token_limit
from rlhf.memory.sizes import with_gradient
from rlhf.models.forward import raise_errors
from rlhf.models.modules import RolloutModule, described
from rlhf.models.placement import autocast, shared_copies
from rlhf.trials.trial import REPEATS, Trial, example, fastest, largest_difference, parts, reject, timed

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks

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
    prompts = max(1, min(share, with_gradient(with_token_limit(cfg)) // cfg.algo.samples_per_prompt))
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
        for module in parts(engine, RolloutModule):
            module.use_compiled(False)
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


def _use(engine: Engine) -> None:
    for module in parts(engine, RolloutModule):
        module.use_compiled(True)


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
