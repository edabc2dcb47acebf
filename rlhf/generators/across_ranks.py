"""One generator that serves all ranks, or one for each: the same to the rest, which gets whole batches.

A request is answered when `result()` is called, which all ranks do together and in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.core.batch import Prompts, Rollouts
from rlhf.generators.generator import Generator

if TYPE_CHECKING:
    from rlhf.core.batch import Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.processes.ranks import Ranks


class Answer(Future[Rollouts]):
    """Rollouts of which this rank has a part, or nothing, until all ranks ask for them."""

    def __init__(self, prompts: Prompts, part: Future[Rollouts] | None, ranks: Ranks) -> None:
        super().__init__()
        self.prompts = prompts
        self.part = part
        self.ranks = ranks

    def whole(self) -> Rollouts:
        """The rollouts of all prompts."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Rollouts:
        """The rollouts; a collective the first time."""
        if not self.done():
            try:
                self.set_result(self.whole())
            except BaseException as error:
                self.set_exception(error)
        return super().result(timeout)


class Shared(Answer):
    """The first rank's generator has them all."""

    def whole(self) -> Rollouts:
        """Send them to all."""
        return self.ranks.from_first(lambda: self.part.result())  # type: ignore[union-attr]


class Gathered(Answer):
    """Each rank's generator has those of its rows."""

    def whole(self) -> Rollouts:
        """Put the parts together."""
        assert self.part is not None
        parts = self.ranks.gather(self.part.result())
        return put_together(self.prompts, parts)


def put_together(prompts: Prompts, parts: list[Rollouts]) -> Rollouts:
    """The rollouts of parts of `prompts`, in order, as those of all."""
    given = {field.name for field in fields(Prompts)}
    found = {
        field.name: joined([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
        if field.name not in given
    }
    found["version"] = min(part.version for part in parts)
    return prompts.extend(type(parts[0]), **found)


def joined(parts: list[Any]) -> Any:
    """Tensors of all parts, by name or not, one below the other; of seconds, the most."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return None if parts[0] is None else max(parts)


class OneForAll(Generator):
    """The first rank's generator answers for all ranks; the others have none."""

    def __init__(self, generator: Generator | None, ranks: Ranks) -> None:
        self.generator = generator
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask the first rank's."""
        part = self.generator.submit(prompts, sampling) if self.generator else None
        return Shared(prompts, part, self.ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give the weights to the first rank's; the other ranks help to gather them."""
        if self.generator:
            self.generator.load(weights, version)
        else:
            for _ in weights:
                pass

    def figures(self) -> Metrics:
        """Those of the first rank's."""
        return self.generator.figures() if self.generator else {}

    def close(self) -> None:
        """Close it."""
        if self.generator:
            self.generator.close()


class OneForEach(Generator):
    """Each rank's own generator answers its rows of a request."""

    def __init__(self, generator: Generator, ranks: Ranks) -> None:
        self.generator = generator
        self.ranks = ranks

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for this rank's rows."""
        rows = self.ranks.rows(len(prompts))
        return Gathered(prompts, self.generator.submit(prompts.select(rows), sampling), self.ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give the weights to every rank's."""
        self.generator.load(weights, version)

    def figures(self) -> Metrics:
        """Those of this rank's."""
        return self.generator.figures()

    def close(self) -> None:
        """Close this rank's."""
        self.generator.close()
