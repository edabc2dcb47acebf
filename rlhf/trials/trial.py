"""A trial of a faster way to compute something: its result, its decision, and what all trials share.

    usual way   --+-- differences of the results  --+-- right, and saves time: the faster way is used
    faster way  --+-- seconds of both ways        --+-- wrong: a warning, an error if the config asks for it

A trial changes no weights, no optimizer and no random numbers of the run.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.models.modules import token_ids

if TYPE_CHECKING:
    from rlhf.engines.engine import Engine

log = logging.getLogger(__name__)

N = TypeVar("N", bound=nn.Module)
T = TypeVar("T")

REPEATS = 3  # runs of a micro-batch; the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of a trial that measures differences and seconds."""

    usual_s: float = 0.0  # seconds of a micro-batch in the usual way
    faster_s: float = 0.0  # seconds of a micro-batch in the faster way
    preparation_s: float = 0.0  # seconds before the first micro-batch, for example of a compilation
    outputs: float = 0.0  # largest difference of an output, relative to 1 + |output|
    gradients: float = 0.0  # difference of the gradients, relative to their norm
    error: str = ""  # the error of the faster way; empty: none

    def right(self, limits: tuple[float, float]) -> bool:
        """Return whether there is no error, and outputs and gradients differ by at most `limits`."""
        return not self.error and self.outputs <= limits[0] and self.gradients <= limits[1]  # NaN: False

    def pays_off(self, uses: int = 1) -> bool:
        """Return whether the faster way saves more time in `uses` micro-batches than its preparation took."""
        return (self.usual_s - self.faster_s) * uses > self.preparation_s

    def differences(self, output: str) -> str:
        """Return the measured differences as text; `output` names an output."""
        return (
            f"{output}s differ by at most {self.outputs:.1e} of 1 + |{output}|, "
            f"gradients by {self.gradients:.1e} of their norm"
        )

    def times(self) -> str:
        """Return the measured times as text."""
        return f"{self.faster_s:.3g} s per micro-batch instead of {self.usual_s:.3g} s"


def reject(key: str, asked: bool | None, fault: str, instead: str) -> None:
    """Warn that the way of the config key `key` has a fault; if the key is true, raise a `UserError`."""
    if asked:
        refused = UserError(f"{key} must be false ({fault}), got true; set {key}=false")
        refused.everywhere = True
        raise refused
    log.warning(f"{fault}; {instead} (set {key}=false to hide this message)")


def parts(engine: Engine, kind: type[N]) -> list[N]:
    """Return the parts of class `kind` in the trained module and in the reference of an engine."""
    roots = [engine.module] if engine.reference is None else [engine.module, engine.reference]
    found = [part for root in roots for part in root.modules() if isinstance(part, kind)]
    return list(dict.fromkeys(found))


def example(
    model: PreTrainedModel,
    prompt_mask: Tensor,  # [N, P] bool
    response_mask: Tensor,  # [N, K, T] bool
    device: torch.device,
    drawn: slice = slice(None),  # of the model's token ids
) -> Rollouts:
    """Return rollouts of random tokens; the random numbers have their own generator."""
    known, draw = token_ids(model)[drawn], torch.Generator().manual_seed(0)
    texts = [""] * len(prompt_mask)
    prompts, responses = (
        known[torch.randint(len(known), mask.shape, generator=draw)] * mask
        for mask in (prompt_mask, response_mask)
    )
    return Rollouts(
        index=torch.arange(len(texts)),
        texts=texts,
        references=texts,
        prompt_ids=prompts,
        prompt_mask=prompt_mask,
        response_ids=responses,
        response_mask=response_mask,
        ended=torch.zeros(response_mask.shape[:2], dtype=torch.bool),
    ).to(device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context for a trial; afterwards, random numbers are as before, GPU caches are empty."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        yield
    if cuda:
        torch.cuda.empty_cache()


@contextmanager
def timed(device: torch.device) -> Iterator[None]:
    """Return an `undisturbed` context without warnings, whose peak of GPU memory is forgotten afterwards."""
    with undisturbed(device), warnings.catch_warnings(action="ignore"):
        yield
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def fastest(step: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Call `step` `REPEATS` times; return the last result, and the seconds of the fastest call."""
    seconds = math.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return result, seconds


def largest_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference of outputs, relative to 1 + |output|; infinite for NaN."""
    gaps = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(gaps).max().nan_to_num(math.inf))
