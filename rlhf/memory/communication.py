"""Memory of messages between ranks: buffers of NCCL, and the bucket of gradients that is summed at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.memory.uses import Part, parameters, times

if TYPE_CHECKING:
    from rlhf.config.footprint import Footprint

_MIB = 2**20
_CHANNELS = 32  # largest number of NCCL's channels; fewer on GPUs without NVLink
_CONNECTION = (
    10 * _MIB
)  # buffers of one connection: 4 MiB (NCCL_BUFFSIZE), and those of the two fast protocols
GROUP = _CHANNELS * 2 * _CONNECTION  # a ring has two connections per channel; 0.5 to 0.7 GiB were reported


def nccl(groups: int) -> Iterator[Part]:
    """Yield the buffers of NCCL on one GPU that is in `groups` groups of processes."""
    if groups:
        made_of = f"{_CHANNELS} channels x 2 connections x {_CONNECTION // _MIB} MiB"
        yield times(Part("NCCL", GROUP, made_of, estimated=True), groups)


def bucket(footprint: Footprint, trained: int, ranks: int) -> Iterator[Part]:
    """Yield the copies of gradients that one message between the ranks contains.

    Args:
        footprint: footprint of the backend.
        trained: number of trained parameters.
        ranks: number of ranks.
    """
    if ranks > 1 and trained:
        count = min(footprint.bucket, trained)
        size = 4 * footprint.copies * count
        yield Part("gradient bucket", size, parameters(count, size), estimated=True)
