"""The processes that train one model together, as torchrun, the launcher of DeepSpeed or SLURM started them.

Every rank holds the whole rollout batch (token ids and one number a token are small); what is divided is the
work: each rank samples, annotates and differentiates its part, and the parts are put together. So credit,
minibatches and metrics are those of one rank, whatever their number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.core.errors import RunError, UserError
from rlhf.core.metrics import merge

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics


T = TypeVar("T")


BUCKET = 25_000_000  # numbers that are sent at once, in the type of the gradients


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together, and its device. Without arguments: alone, on the CPU.

    All ranks must call the same methods in the same order. Where one does not come, the others raise
    RunError: as soon as its connection breaks, or when the time limit that they joined with is over.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device, timeout_s: float) -> Ranks:
        """Meet the others that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(device, rank, size)

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def rows(self, count: int) -> Tensor:
        """This rank's part of `count` rows: [M] int64."""
        return torch.arange(count).tensor_split(self.size)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape."""
        if self.size > 1:
            x = x.clone()
            with together():
                dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag))))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with together():
            dist.all_gather_object(found, value)
        return found

    def first_of(self, value: T | None) -> T | None:
        """The first value of a rank that is not None, for every rank."""
        return next((found for found in self.gather(value) if found is not None), None)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives the first rank, for every rank; the others do not call it.

        Raises:
            RunError, UserError: what it raised there, on every rank.
        """
        if self.size == 1:
            return make()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = make()
            except (RunError, UserError) as error:
                error.everywhere = True
                answer[1] = error
        with together():
            dist.broadcast_object_list(answer, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all ranks, in place. Where no rank has a gradient, there is none after."""
        if self.size == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        there = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        used = [p for p, has in zip(trained, self.sum(there).tolist(), strict=True) if has]
        for bucket in buckets(used):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
            pieces = flat.split([grad.numel() for grad in grads])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    def merge(self, figures: Metrics) -> Metrics:
        """The figures of all ranks, which have the same names, as those of one."""
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
    """Say of a rank that was lost what torch says in its own words."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            "the ranks lost one another: one died (then it says why itself, or was killed), or did not come "
            f"within backend.timeout_s ({type(error).__name__}: {str(error).splitlines()[0]:.200})"
        ) from error


def buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in order, in groups of one type and at most `BUCKET` numbers (one parameter at least)."""
    found: list[list[torch.nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        if not found or found[-1][0].dtype != parameter.dtype or held + parameter.numel() > BUCKET:
            found.append([])
            held = 0
        found[-1].append(parameter)
        held += parameter.numel()
    return found
