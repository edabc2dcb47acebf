"""Ranks: the processes that train one model together, started by torchrun, DeepSpeed's launcher or SLURM.

Every rank stores the whole rollout batch, because token ids and one number per token need little memory. The
work is divided: each rank samples, annotates and differentiates its part of the batch, then the parts are
gathered. So credit assignment, minibatches and metrics do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.core import launched
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.metrics import merge

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics

T = TypeVar("T")

BUCKET = 25_000_000  # maximum number of gradient elements in one message


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank and device of this process, and collective operations with the other ranks.

    `Ranks()` is a single process on the CPU. All ranks must call the same methods in the same order. If a
    rank does not take part, the other ranks raise RunError when its connection breaks, or after the time
    limit that was passed to `join`.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device, timeout_s: float) -> Ranks:
        """Connect to the other ranks, as the launcher's environment variables describe them.

        Args:
            device: the type of device to train on; with CUDA, each rank uses the GPU of its local rank.
            timeout_s: time limit in seconds of each collective operation.
        """
        rank, size = launched.rank(), launched.world_size()
        if device.type == "cuda":
            device = torch.device("cuda", launched.local_rank())
            torch.cuda.set_device(device)
        if size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(device, rank, size)

    @property
    def first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def rows(self, count: int) -> Tensor:
        """Return the indices of this rank's part of `count` rows, [rows of the part] int64."""
        return torch.arange(count).tensor_split(self.size)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks; `x` must have the same shape on every rank."""
        if self.size > 1:
            x = x.clone()
            with together():
                dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag))))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with together():
            dist.all_gather_object(values, value)
        return values

    def first_of(self, value: T | None) -> T | None:
        """Return on every rank the value of the lowest rank whose value is not None; None if all are None."""
        return next((each for each in self.gather(value) if each is not None), None)

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank only, and return its result on every rank.

        Raises:
            RunError, UserError, Interrupted: on every rank, if `make` raised it on the first rank.
        """
        if self.size == 1:
            return make()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = make()
            except Interrupted as error:
                answer[1] = error
            except (RunError, UserError) as error:
                error.everywhere = True
                answer[1] = error
        with together():
            dist.broadcast_object_list(answer, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over all ranks, in place; a gradient that is None on all ranks stays None."""
        if self.size == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has_grad = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        used = [p for p, count in zip(trained, self.sum(has_grad).tolist(), strict=True) if count]
        for bucket in buckets(used):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
            pieces = flat.split([grad.numel() for grad in grads])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def merge(self, figures: Metrics) -> Metrics:
        """Return the merged metrics of all ranks; every rank must have the same names of metrics."""
        if self.size == 1 or not figures:
            return figures
        own = torch.stack([stat.numbers() for stat in figures.values()]).cpu()
        tables = [torch.empty_like(own) for _ in range(self.size)]
        with together():
            dist.all_gather(tables, own)
        merged: Metrics = {}
        for table in tables:
            parts = zip(figures.items(), table.tolist(), strict=True)
            merge(merged, {name: stat.with_numbers(*numbers) for (name, stat), numbers in parts})
        return merged


ALONE = Ranks()


@contextmanager
def together() -> Iterator[None]:
    """Run a collective; raise RunError instead of torch's RuntimeError if another rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise connection_failed(error) from error


@contextmanager
def explain_lost_ranks() -> Iterator[None]:
    """Raise RunError for an error of a collective that a library ran, for example DeepSpeed's backward."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise connection_failed(error) from error


def connection_failed(error: RuntimeError) -> RunError:
    """Return the error of a run in which a collective failed."""
    return RunError(
        "the connection between the ranks failed: a rank ended (it prints its own error, unless it was "
        "killed), or did not respond within backend.timeout_s "
        f"({type(error).__name__}: {str(error).splitlines()[0]:.200})"
    )


def buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return consecutive groups of `parameters`, each with one dtype and at most `BUCKET` elements.

    A parameter with more elements is a group of its own.
    """
    groups: list[list[torch.nn.Parameter]] = []
    elements = 0  # number of elements in the last group
    for parameter in parameters:
        if not groups or groups[-1][0].dtype != parameter.dtype or elements + parameter.numel() > BUCKET:
            groups.append([])
            elements = 0
        groups[-1].append(parameter)
        elements += parameter.numel()
    return groups
