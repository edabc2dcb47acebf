"""Weights from the trainer to another process of the same host: what all ways have, and shared memory.

A `WeightStore` keeps versions, each written tensor by tensor; a `Manifest` says which tensors and checksums
they are, and the process confirms it. `rlhf/generators/gpu_transfer.py` has the stores that keep them on a
GPU. Here is the one that works everywhere, where a version is a file in memory. The other side maps the file,
and takes no tensor whose checksum differs:

    shared = SharedWeights()                        # trainer
    manifest = shared.write(engine.weights(), 3)
    for name, tensor in read(manifest): ...         # generator: views of the file, to be copied
    shared.release(manifest)                        # trainer: the file may be written again

Several processes may take the same file over: `hold` says that one more needs it, and it is written again
when all have released it.

On Linux the file has no name (memfd), so that nothing is left behind however the processes end, and its size
is not bounded by /dev/shm; the other process opens it as /proc/<trainer's pid>/fd/<number>. Elsewhere it is a
file in a temporary folder, whose name has the trainer's pid.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlhf.core.errors import RunError

HEADER = struct.Struct("<q")  # the version that the file holds


NOTHING = -1  # in its place while the file is written


ALIGNMENT = 64  # bytes; a view of the file needs that of its type


class TransferError(RunError):
    """Weights that did not arrive as they were sent; says which tensor and which versions."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, in the file
    bytes: int
    checksum: int  # `checksum(tensor)`; on a GPU `fingerprint(tensor)`


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which tensors the weights of `version` are. Small, and goes through pickle."""

    version: int
    path: str  # of the file that holds them; empty: they are on a GPU
    entries: tuple[Entry, ...]
    update: dict[str, Any] | None = None  # on a GPU: how vLLM's engine gets them, beside names, types, shapes
    group: dict[str, Any] | None = None  # NCCL: a group that has to be joined first

    def checksums(self) -> dict[str, int]:
        """Checksums by tensor name: what who takes the weights over has to confirm."""
        return {entry.name: entry.checksum for entry in self.entries}


class WeightStore(ABC):
    """The trainer's side: keeps versions of the weights until the generator's process has taken them over.

        manifest = store.write(engine.weights(), 3)   a copy; the trainer goes on
        told = store.offer(manifest, fail)            when its turn comes: what the process is told
        store.finish(manifest)                        the process says that it has taken them over
        store.release(manifest)                       nobody needs them any more

    `write` and `close` are called by the trainer's thread, the others by the thread that carries jobs.
    """

    @abstractmethod
    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy `weights`. A tensor is whole only until the next is asked for (an engine that gathers it from
        shards uses the memory again), so each is copied before that.

        Raises:
            RunError: there is not enough memory.
        """

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """What the process is to be told about a version now. Where the trainer has to send, it begins to,
        and calls `fail` from another thread where it cannot; `check` then says why.
        """
        return manifest

    def finish(self, manifest: Manifest) -> None:  # noqa: B027
        """The process has taken over what was offered."""

    def check(self) -> None:  # noqa: B027
        """Raise RunError where what was offered could not be sent."""

    def forget(self) -> None:  # noqa: B027
        """The process is gone, and whatever was being sent to it is given up."""

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Nobody needs this version any more."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


def confirm(manifest: Manifest, version: int, taken: dict[str, int]) -> None:
    """Compare what a generator says that it holds, checksums `taken` by name, with what was sent.

    Raises:
        TransferError: another version, or tensors that are missing, unknown or different.
    """
    sent = manifest.checksums()
    if version != manifest.version:
        raise TransferError(
            f"the generator must confirm version {manifest.version}, the weights that it was sent, "
            f"got version {version}"
        )
    for name in sent.keys() | taken.keys():
        if sent.get(name) != taken.get(name):
            raise TransferError(
                f"the generator must hold {name} of version {version} with the checksum "
                f"{shown(sent.get(name))}, as the trainer sent it, got {shown(taken.get(name))}"
            )


def shown(value: int | None) -> str:
    """A checksum in words."""
    return "none: there is no such tensor" if value is None else f"{value:016x}"


def checksum(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes, the same wherever they lie. Against accidents, not against intent."""
    return digest(raw(tensor))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row; of one on a GPU, a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def digest(data: memoryview) -> int:
    """The checksum of bytes: XXH3, at half the cost of copying them."""
    return xxhash.xxh3_64_intdigest(data)
