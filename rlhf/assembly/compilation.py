"""The decision whether the blocks of a run's models are compiled, from a trial before the first update.

    one micro-batch of the longest sequences  --+-- usual blocks    --+-- difference of outputs and gradients,
    one micro-batch of half the size          --+-- compiled blocks --+-- seconds, seconds of the compilation

With `backend.compile=null`, only a GPU compiles, and only if the time that compiled blocks save in the run
exceeds the time of the compilation. The trial changes no weights, no optimizer and no random numbers.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlhf.config.model import Dtype
from rlhf.core.batch import Batch
from rlhf.core.console import say_row
from rlhf.core.errors import UserError
from rlhf.engines.optimizers import trained
from rlhf.memory.plan import with_token_limit
from rlhf.memory.tokens import with_gradient
from rlhf.models.compilation import CompiledBlocks, raise_errors
from rlhf.models.modules import RolloutModule, described, token_ids
from rlhf.models.precision import autocast, shared_copies

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.engines.engine import Engine
    from rlhf.processes.ranks import Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")

_REPEATS = 3  # runs of a micro-batch; the fastest counts
WORTH_TRYING_S = 600.0  # seconds; a run that trains for less time starts no trial, which takes minutes
# Largest differences of outputs (relative to 1 + |output|) and of gradients (relative to their norm). In 16
# bits, compiled blocks round less often. A wrong mask or layout changes gradients by about their norm.
LIMITS = {Dtype.float32: (1e-3, 1e-3), Dtype.bfloat16: (1.0, 0.1), Dtype.float16: (0.3, 0.03)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of a trial."""

    usual_s: float  # seconds of a micro-batch with the usual blocks
    compiled_s: float = 0.0  # seconds of a micro-batch with compiled blocks
    compilation_s: float = 0.0  # seconds of the compilation
    outputs: float = 0.0  # largest difference of log-probs, rewards or values, relative to 1 + |output|
    gradients: float = 0.0  # norm of the difference of the gradients, relative to their norm
    error: str = ""  # the error of the compiler; empty: none

    def fault(self, dtype: Dtype) -> str | None:
        """Return why compiled blocks cannot be used in `dtype`; None: they can."""
        if self.error:
            return f"the blocks cannot be compiled: {self.error}"
        right = self.outputs <= LIMITS[dtype][0] and self.gradients <= LIMITS[dtype][1]  # NaN: False
        return None if right else f"compiled blocks give wrong results: {self.difference()}"

    def pays_off(self, left: int) -> bool:
        """Return whether compiled blocks save more time in `left` micro-batches than the compilation took."""
        return (self.usual_s - self.compiled_s) * left > self.compilation_s

    def difference(self) -> str:
        """Return the measured differences as text."""
        return (
            f"outputs differ by at most {self.outputs:.1e} of 1 + |output|, "
            f"gradients by {self.gradients:.1e} of their norm"
        )

    def times(self) -> str:
        """Return the measured times as text."""
        return (
            f"{self.compiled_s:.3g} s per micro-batch instead of {self.usual_s:.3g} s, "
            f"compiled in {self.compilation_s:.0f} s"
        )


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
    batches = [example(engine, cfg, each) for each in (prompts, -(-prompts // 2))]
    with undisturbed(ranks.device):
        usual_s = max(ranks.gather(run(engine, batches[0])[2]))
        if asked is None and usual_s * left < WORTH_TRYING_S:
            return
        raise_errors(True)
        trial = largest([compare(engine, batch) for batch in batches])
    trial = largest(ranks.gather(trial))
    fault = trial.fault(engine.settings.dtype)
    if asked and fault is not None:
        refused = UserError(f"backend.compile must be false ({fault}), got true; set backend.compile=false")
        refused.everywhere = True
        raise refused
    if fault is not None:
        log.warning(f"{fault}; blocks are not compiled (set backend.compile=false to hide this message)")
    elif asked or trial.pays_off(left):
        for module in modules(engine):
            module.blocks = CompiledBlocks(module.model).used
        raise_errors(False)
        say_row("compiled blocks", f"yes; {trial.difference()}; {trial.times()}")
    else:
        say_row("compiled blocks", f"no, too little gain in {left} micro-batches: {trial.times()}")


def may_pay_off(cfg: Config, device: torch.device) -> bool:
    """Return whether `backend.compile=null` starts a trial: on a GPU, if the backend can compile."""
    return device.type == "cuda" and cfg.backend.compiles


def work(cfg: Config, ranks: Ranks, updates: int) -> tuple[int, int]:
    """Return the prompts of a micro-batch of the longest sequences, and the micro-batches of `updates`."""
    share = -(-cfg.schedule.prompts_per_update // (cfg.schedule.minibatches * ranks.size))  # of a minibatch
    prompts = max(1, min(share, with_gradient(with_token_limit(cfg)) // cfg.algo.samples_per_prompt))
    return prompts, updates * cfg.schedule.epochs * cfg.schedule.minibatches * -(-share // prompts)


def example(engine: Engine, cfg: Config, prompts: int) -> Batch:
    """Return a batch of random token ids, of the largest lengths of the run."""
    samples, known = cfg.algo.samples_per_prompt, token_ids(engine.module.model)
    asked, answered = (prompts, cfg.task.max_prompt_tokens), (prompts, samples, cfg.generator.response_length)
    draw = torch.Generator().manual_seed(0)
    return Batch(
        index=torch.arange(prompts),
        texts=[""] * prompts,
        references=[""] * prompts,
        prompt_ids=known[torch.randint(0, len(known), asked, generator=draw)],
        prompt_mask=torch.ones(asked, dtype=torch.bool),
        response_ids=known[torch.randint(0, len(known), answered, generator=draw)],
        response_mask=torch.ones(answered, dtype=torch.bool),
        ended=torch.zeros(prompts, samples, dtype=torch.bool),
        scores=torch.zeros(prompts, samples),
    ).to(engine.ranks.device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context for a trial, without warnings of the compiler.

    Afterwards, random numbers are as before, and cached memory of a GPU is free.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []), warnings.catch_warnings(action="ignore"):
        yield
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def compare(engine: Engine, batch: Batch) -> Trial:
    """Return times and differences of a micro-batch with the usual and with compiled blocks."""
    expected, usual_gradients, usual_s = run(engine, batch)
    start = time.perf_counter()
    try:
        for module in modules(engine):
            module.blocks = CompiledBlocks(module.model).used
        found, gradients, compiled_s = run(engine, batch)
    except (RuntimeError, OSError, ImportError) as error:  # of the compiler, or of a program that it starts
        return Trial(usual_s=usual_s, error=described(error))
    finally:
        for module in modules(engine):
            module.blocks = nullcontext
        engine.discard()
    gaps = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(found, expected, strict=True)]
    change = torch.stack([(a - b).norm() for a, b in zip(gradients, usual_gradients, strict=True)]).norm()
    norm = torch.stack([each.norm() for each in usual_gradients]).norm()
    return Trial(
        usual_s=usual_s,
        compiled_s=compiled_s,
        compilation_s=max(0.0, time.perf_counter() - start - _REPEATS * compiled_s),
        outputs=float(torch.stack(gaps).max().nan_to_num(math.inf)),
        gradients=float((change / norm).nan_to_num(math.inf)),
    )


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


def fastest(step: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Call `step` `_REPEATS` times; return the last result, and the seconds of the fastest call."""
    seconds = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return result, seconds


def _take_gradients(engine: Engine) -> list[Tensor]:
    """Return the gradients of the trained parameters, 0 without a gradient, and delete them."""
    found = []
    for parameter in trained(engine.module):
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return found


def modules(engine: Engine) -> list[RolloutModule]:
    """Return the modules of an engine that run a Hugging Face model over rollouts."""
    roots = [engine.module] if engine.reference is None else [engine.module, engine.reference]
    return [module for root in roots for module in root.modules() if isinstance(module, RolloutModule)]


def largest(trials: list[Trial]) -> Trial:
    """Return the largest value of each field; an error is larger than none."""
    return Trial(**{each.name: max(getattr(trial, each.name) for trial in trials) for each in fields(Trial)})
