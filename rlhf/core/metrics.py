"""Metrics as sums and counts, merged over micro-batches, ranks and updates into a row of metrics.jsonl.

Sums stay tensors on their device until a row is written, so that measuring does not wait for the GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class How(Enum):
    """The rule by which two values of a metric are merged."""

    mean = "mean"
    sum = "sum"
    max = "max"
    last = "last"
    sample_size = "sample_size"  # effective sample size of importance weights, divided by their number


@dataclass(slots=True, frozen=True)
class Stat:
    """A metric over `count` items. `total` is the sum, the maximum or the last of the items (see `how`)."""

    total: Tensor | float
    count: Tensor | float = 1.0
    how: How = How.mean
    squares: Tensor | float = 0.0  # for sample_size: sum of the squared weights

    def merge(self, later: Stat) -> Stat:
        """Return this value and a later value of the same metric, merged."""
        if self.how is How.max:
            both = (torch.as_tensor(part.total, dtype=torch.float64) for part in (self, later))
            return Stat(torch.maximum(*both), 1.0, How.max)  # nan if either value is nan
        if self.how is How.last:
            return later
        return Stat(
            self.total + later.total, self.count + later.count, self.how, self.squares + later.squares
        )

    def emptied(self) -> Stat:
        """Return a metric with the same `how` over no items."""
        return Stat(-math.inf if self.how is How.max else 0.0, 0.0, self.how)

    def value(self) -> float | None:
        """Return the value of the metric; None for a mean or a sample size over no items."""
        if self.how is How.sample_size:
            spread = float(self.count) * float(self.squares)
            return float(self.total) ** 2 / spread if spread else None
        if self.how is not How.mean:
            return float(self.total)
        return float(self.total) / float(self.count) if float(self.count) else None


Metrics = dict[str, Stat]


def selected(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` where `mask` is True, else 0: unlike a product, also where `x` is NaN or infinite."""
    return torch.where(mask, x, 0.0)


def mean(x: Tensor, mask: Tensor | None = None) -> Stat:
    """Return the mean of `x` over all elements, or over the elements where `mask` is True."""
    x = x.detach().double()
    if mask is None:
        return Stat(x.sum(), float(x.numel()))
    return Stat(selected(x, mask).sum(), mask.sum())


def largest(x: Tensor, mask: Tensor) -> Stat:
    """Return the maximum of `x` where `mask` is True; -inf if `mask` is False everywhere."""
    return Stat(x.detach().double().masked_fill(~mask, -torch.inf).max(), 1.0, How.max)


def sample_size(weights: Tensor, mask: Tensor | None = None) -> Stat:
    """Return the effective sample size of importance weights as a fraction of their number.

    The value is `(sum w)^2 / (n sum w^2)` (Kong 1992), between 0 and 1. The sums are over all `n` weights, or
    over the `n` weights where `mask` is True.
    """
    own = mean(weights, mask)
    return Stat(own.total, own.count, How.sample_size, mean(weights.detach().double().square(), mask).total)


def merge(into: Metrics, added: Metrics) -> None:
    """Merge the metrics `added` into `into`, in place."""
    for name, stat in added.items():
        into[name] = into[name].merge(stat) if name in into else stat


def plain(metrics: Metrics) -> Metrics:
    """Return metrics with Python floats instead of tensors.

    All numbers of a device are read at once, so that a GPU is waited for once.
    """
    parts = [part for stat in metrics.values() for part in (stat.total, stat.count, stat.squares)]
    tensors = {i: part.double() for i, part in enumerate(parts) if isinstance(part, Tensor)}
    for device in {x.device for x in tensors.values()}:
        places = [i for i, x in tensors.items() if x.device == device]
        for i, value in zip(places, torch.stack([tensors[i] for i in places]).tolist(), strict=True):
            parts[i] = value
    rows = [map(float, parts[i : i + 3]) for i in range(0, len(parts), 3)]
    named = zip(metrics.items(), rows, strict=True)
    return {name: Stat(total, count, stat.how, squares) for (name, stat), (total, count, squares) in named}


def of_scorer(figures: dict[str, Tensor] | None) -> Metrics:
    """Return the field `figures` of a batch as metrics; a figure with the count 0 is a sum."""
    rows = ((name, *x.sum(0).tolist()) for name, x in (figures or {}).items())
    return {name: Stat(total, count or 1.0, How.mean if count else How.sum) for name, total, count in rows}


class Timer:
    """A stopwatch that adds up seconds by name since the last `drain()`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def drain(self) -> Metrics:
        """Return the seconds as metrics `time/<name>_s`, and reset them to zero."""
        stats = {f"time/{name}_s": Stat(seconds, 1.0, How.sum) for name, seconds in self.seconds.items()}
        self.seconds = {}
        return stats


@dataclass(slots=True)
class Evaluation:
    """Results of an evaluation: metrics (`eval/...`), and the completions that the metrics measure."""

    figures: Row
    samples: list[dict[str, Any]] = field(default_factory=list)  # one row per completion
    examples: int = 0  # number of examples over which each metric is computed
    scores: list[float] | None = None  # score of each completion; None: no scorer can score completions
    messages: list[str] | None = None  # the last message before each completion; None: prompts are texts

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The rows of `samples` for the terminal, where the last message stands for a dialogue."""
        if self.messages is None:
            return self.samples
        rows = zip(self.samples, self.messages, strict=True)
        return [{**sample, "prompt": message} for sample, message in rows]


Row = dict[str, float]
