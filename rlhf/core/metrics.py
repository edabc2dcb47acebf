"""Figures on their way from a micro-batch to a row of metrics.jsonl, kept as sums and counts until then.

Sums stay tensors on their device until then, so that measuring does not wait for a GPU.
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
    """How two parts of one figure become one."""

    mean = "mean"
    sum = "sum"
    max = "max"
    last = "last"
    sample_size = "sample_size"  # effective, of importance weights, as a part of their number


@dataclass(slots=True, frozen=True)
class Stat:
    """A figure over `count` items: `total` is their sum, the largest, or the last."""

    total: Tensor | float
    count: Tensor | float = 1.0
    how: How = How.mean
    squares: Tensor | float = 0.0  # sample_size: the sum of their squares

    def merge(self, later: Stat) -> Stat:
        """This and a later part of the same figure as one."""
        if self.how is How.max:
            both = (torch.as_tensor(part.total, dtype=torch.float64) for part in (self, later))
            return Stat(torch.maximum(*both), 1.0, How.max)  # nan where one is
        if self.how is How.last:
            return later
        return Stat(
            self.total + later.total, self.count + later.count, self.how, self.squares + later.squares
        )

    def plain(self) -> Stat:
        """The same with plain numbers."""
        return Stat(float(self.total), float(self.count), self.how, float(self.squares))

    def numbers(self) -> Tensor:
        """Total, count and squares as a tensor [3], float64, on the device of the first that is a tensor."""
        parts = (self.total, self.count, self.squares)
        device = next((part.device for part in parts if isinstance(part, Tensor)), None)
        return torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts])

    def with_numbers(self, total: float, count: float, squares: float) -> Stat:
        """The same kind of figure, of other `numbers()`."""
        return Stat(total, count, self.how, squares)

    def emptied(self) -> Stat:
        """The same kind of figure, of nothing."""
        return Stat(-math.inf if self.how is How.max else 0.0, 0.0, self.how)

    def value(self) -> float | None:
        """The figure; None where there was nothing to average."""
        if self.how is How.sample_size:
            spread = float(self.count) * float(self.squares)
            return float(self.total) ** 2 / spread if spread else None
        if self.how is not How.mean:
            return float(self.total)
        return float(self.total) / float(self.count) if float(self.count) else None


Metrics = dict[str, Stat]


def mean(x: Tensor, mask: Tensor | None = None) -> Stat:
    """The mean of `x` over all of it, or where `mask` (same shape, bool) is True."""
    x = x.detach().double()
    if mask is None:
        return Stat(x.sum(), float(x.numel()))
    return Stat((x * mask).sum(), mask.sum())


def largest(x: Tensor, mask: Tensor) -> Stat:
    """The largest `x` where `mask` is True; -inf where it is nowhere."""
    return Stat(x.detach().double().masked_fill(~mask, -torch.inf).max(), 1.0, How.max)


def sample_size(weights: Tensor, mask: Tensor) -> Stat:
    """The effective sample size of importance weights where `mask` is True, from 0 to 1 of their number:
    `(sum w)^2 / (n sum w^2)` (Kong 1992).
    """
    w = weights.detach().double() * mask
    return Stat(w.sum(), mask.sum(), How.sample_size, w.square().sum())


def merge(into: Metrics, added: Metrics) -> None:
    """Add the figures `added` to `into`."""
    for name, stat in added.items():
        into[name] = into[name].merge(stat) if name in into else stat


class Timer:
    """Seconds spent under each name since the last `drain()`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def drain(self) -> Metrics:
        """The seconds as `time/<name>_s`, and start again from zero."""
        stats = {f"time/{name}_s": Stat(seconds, 1.0, How.sum) for name, seconds in self.seconds.items()}
        self.seconds = {}
        return stats


@dataclass(slots=True)
class Evaluation:
    """Figures (names of `eval/`), and the completions that they were measured on."""

    figures: Row
    samples: list[dict[str, Any]] = field(default_factory=list)
    examples: int = 0  # that each figure is of


Row = dict[str, float]
