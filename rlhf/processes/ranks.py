"""Ranks: the processes that train one model together, started by torchrun, DeepSpeed's launcher or SLURM.

Every rank stores the whole rollout batch, because token ids and one number per token need little memory. The
work is divided: each rank samples, annotates and differentiates its part of the batch, then the parts are
gathered. So credit assignment, minibatches and metrics do not depend on the number of ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.core import launched
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.machine import choose_interfaces, loopback
from rlhf.core.metrics import Metrics, merge, plain

T = TypeVar("T")

BUCKET = 25_000_000  # maximum number of gradient elements in one message
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # type of device -> torch's backends for messages
_NOTICE_S = 60.0  # longest time in seconds until a rank that other ranks wait for reports that it is alive


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank and device of this process, and collective operations with the other ranks.

    `Ranks()` is a single process on the CPU. All ranks must call the same methods in the same order. If a
    rank does not take part, the other ranks raise RunError when its connection breaks, or after the time
    limit that was passed to `join`. In `from_first` and `wait_for` the other ranks may wait longer: the time
    limit applies to the messages of the rank they wait for, one every `notice_s` seconds.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    size: int = 1
    notice_s: float = _NOTICE_S

    @classmethod
    def join(cls, device: torch.device, timeout_s: float) -> Ranks:
        """Connect to the other ranks, as the launcher's environment variables describe them.

        Args:
            device: the type of device to train on; with CUDA, each rank uses the GPU of its local rank.
            timeout_s: time limit in seconds of each collective operation.

        Raises:
            UserError: the ranks are on several hosts, and no network interface leads to the first rank.
        """
        rank, size = launched.rank(), launched.world_size()
        if device.type == "cuda":
            device = torch.device("cuda", launched.local_rank())
            torch.cuda.set_device(device)
        if size > 1 and not dist.is_initialized():
            choose_interfaces(cuda=device.type == "cuda")
            dist.init_process_group(_BACKENDS[device.type], timeout=timedelta(seconds=timeout_s))
        return cls(device, rank, size, min(_NOTICE_S, timeout_s / 4))

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

        `make` has no time limit, and runs no collective: while it runs, a thread of the first rank reports to
        the others every `notice_s` seconds that it is alive.

        Raises:
            RunError, UserError, Interrupted: on every rank, if `make` raised it on the first rank.
        """
        if self.size == 1:
            return make()
        answer: list[Any] = [False, None, None]  # whether `make` has ended, its result, its error
        if self.first:
            ended = threading.Event()

            def report() -> None:
                with suppress(RunError):  # a rank is lost: the next collective of this rank raises it, too
                    while not ended.wait(self.notice_s):
                        _broadcast([False, None, None])

            reporter = threading.Thread(target=report, name="reporter", daemon=True)
            reporter.start()
            try:
                answer[1] = make()
            except Interrupted as error:
                answer[2] = error
            except (RunError, UserError) as error:
                error.everywhere = True
                answer[2] = error
            finally:
                ended.set()
                reporter.join()
            answer[0] = True
            _broadcast(answer)
        while not answer[0]:
            _broadcast(answer)
        if answer[2] is not None:
            raise answer[2]
        return answer[1]

    def wait_for(self, future: Future[Any]) -> None:
        """Wait until the future of every rank is done; each rank has its own future."""
        while self.any(bool(wait([future], self.notice_s).not_done)):
            pass

    def merge(self, figures: Metrics) -> Metrics:
        """Return the merged metrics of all ranks."""
        if self.size == 1:
            return figures
        merged: Metrics = {}
        for own in self.gather(plain(figures)):
            merge(merged, own)
        return merged


ALONE = Ranks()


def have_group(device: torch.device) -> None:
    """Create a process group of one rank, which uses no network, unless the ranks have a group.

    Libraries that divide weights over ranks require a group even for one rank.
    """
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        dist.init_process_group(_BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)


def _broadcast(values: list[Any]) -> None:
    """Replace the values in the list of every rank by those of the first rank; all lists are equally long."""
    with together():
        dist.broadcast_object_list(values, device=torch.device("cpu"))


@contextmanager
def together() -> Iterator[None]:
    """Run a collective; raise RunError instead of torch's RuntimeError if another rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise _connection_failed(error) from error


def lost_rank(error: Exception) -> RunError | None:
    """Explain an error of a collective that a library ran, for example DeepSpeed's backward."""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return _connection_failed(error)
    return None


def _connection_failed(error: Exception) -> RunError:
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
