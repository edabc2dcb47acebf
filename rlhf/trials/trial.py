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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config.models import Dtype
from rlhf.core.batch import Rollouts
from rlhf.core.errors import UserError
from rlhf.models.modules import described, token_ids
from rlhf.terminal.console import say_row

if TYPE_CHECKING:
    from rlhf.engines.engine import Engine

log = logging.getLogger(__name__)

N = TypeVar("N", bound=nn.Module)
T = TypeVar("T")

_REPEATS = 3  # runs of a micro-batch; the fastest counts


class Measured(NamedTuple):
    """What one way to compute a micro-batch gives."""

    outputs: list[Tensor]
    gradients: list[list[Tensor]]  # groups of tensors; the difference of a group is relative to its norm
    seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial that measures differences and seconds."""

    usual_s: float = 0.0  # seconds of a micro-batch in the usual way
    faster_s: float = 0.0  # seconds of a micro-batch in the faster way
    preparation_s: float = 0.0  # seconds before the first micro-batch, for example of a compilation
    outputs: float = 0.0  # largest difference of an output, relative to 1 + |output|
    gradients: float = 0.0  # largest difference of the gradients of a group, relative to their norm
    error: str = ""  # the error of the faster way; empty: none

    @classmethod
    def of(
        cls, usual: Callable[[], Measured], faster: Callable[[], Measured], *errors: type[Exception]
    ) -> Trial:
        """Return the result of a trial of two ways; `errors` of the faster way become the result."""
        expected, start = usual(), time.perf_counter()
        try:
            found = faster()
        except errors as error:
            return cls(usual_s=expected.seconds, error=described(error))
        preparation_s = max(0.0, time.perf_counter() - start - _REPEATS * found.seconds)
        gaps = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(found[0], expected[0], strict=True)]
        changes = [
            torch.stack([(a - b).norm() for a, b in zip(own, usual, strict=True)]).norm()
            / torch.stack([each.norm() for each in usual]).norm()
            for own, usual in zip(found.gradients, expected.gradients, strict=True)
        ]
        outputs, gradients = (float(torch.stack(x).max().nan_to_num(math.inf)) for x in (gaps, changes))
        return cls(expected.seconds, found.seconds, preparation_s, outputs, gradients)

    @property
    def differences(self) -> str:
        """The measured differences as text."""
        return (
            f"outputs differ by at most {self.outputs:.1e} of 1 + |output|, "
            f"gradients by {self.gradients:.1e} of their norm"
        )

    def pays_off(self, uses: float) -> bool:
        """Return whether the faster way saves more time in `uses` micro-batches than its preparation took."""
        return (self.usual_s - self.faster_s) * uses > self.preparation_s


@dataclass(frozen=True, slots=True)
class Way:
    """A faster way, and how a trial decides about its use."""

    key: str  # of the config: true asks for the way, null for a decision
    name: str  # in messages
    limits: dict[Dtype, tuple[float, float]]  # largest right differences of outputs and of gradients

    def fault(self, trial: Trial, dtype: Dtype) -> str | None:
        """Return why the way cannot be used with forwards in `dtype`; None: it computes the same."""
        if trial.error:
            return f"error of {self.name}: {trial.error}"
        outputs, gradients = self.limits[dtype]
        right = trial.outputs <= outputs and trial.gradients <= gradients  # NaN: False
        return None if right else f"wrong results of {self.name}: {trial.differences}"

    def chosen(self, trial: Trial, dtype: Dtype, asked: bool | None, uses: float) -> bool:
        """Return whether the run uses the way, and report the decision.

        Args:
            trial: the result of the trial, the same on all ranks.
            dtype: the dtype of the forwards.
            asked: the value of the key; None: use the way if it saves time.
            uses: the micro-batches of the rest of the run.

        Raises:
            UserError: the config asks for the way, and it fails or gives wrong results.
        """
        if fault := self.fault(trial, dtype):
            if asked:
                refused = UserError(f"{self.key} must be false ({fault}), got true; set {self.key}=false")
                refused.everywhere = True
                raise refused
            log.warning(f"{fault}; the usual way is used (set {self.key}=false to hide this message)")
            return False
        used = bool(asked) or trial.pays_off(uses)
        answer = "yes" if used else "no, too little gain in the rest of the run"
        times = f"{trial.faster_s:.3g} s per micro-batch instead of {trial.usual_s:.3g} s"
        compilation = f"compiled in {trial.preparation_s:.0f} s"
        say_row(self.name, f"{answer}; {trial.differences}; {times}, {compilation}")
        return used


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
    """Call `step` `_REPEATS` times; return the last result, and the seconds of the fastest call."""
    seconds = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return result, seconds
