"""Assignment of the GPUs of a host to the processes of a run. This module imports no torch."""

from __future__ import annotations

from collections.abc import Collection


def worker_gpu(number: int, gpus: int, ranks: int, rank: int, reserved: Collection[int] = ()) -> int:
    """Return the index of the GPU of a worker process, for example a generator process or an annotator.

    The ranks use the first GPUs. Worker processes use the other GPUs in turn, starting with the last one. If
    there is no other GPU, a worker process shares the GPU of the rank that starts it.

    Args:
        number: number of the process among the worker processes of the host, from 0.
        gpus: number of GPUs that the processes of the host see.
        ranks: number of ranks on the host.
        rank: rank on the host of the process that starts the worker process.
        reserved: GPUs that the process must not use, besides those of the ranks.
    """
    free = [gpu for gpu in range(ranks, gpus) if gpu not in reserved]
    return free[-1 - number % len(free)] if free else min(rank, gpus - 1)
