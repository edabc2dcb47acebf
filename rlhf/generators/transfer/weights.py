"""The interface of weight transfer from the trainer to a generator process: manifest, store and checksums.

A `WeightStore` keeps versions of the weights. The stores are in `rlhf/generators/transfer/`:
`shared_memory.py` works everywhere, and `gpu.py` keeps versions on a GPU for CUDA IPC and NCCL. A `Manifest`
lists the tensors of a version with their checksums. The generator process reports the checksums of the
tensors that it loaded, and `confirm` compares them with the manifest. Origin of the reported checksums:

    HF                     `shared_memory.read` verifies the tensors in the file; after the copy, the process
                           computes the checksums again, from the tensors of its model
    vLLM, shared memory    `shared_memory.read` or `files.read_file` verifies the tensors in the file; after
    or a file              the load, vLLM computes the checksums of these tensors again
    vLLM, IPC or NCCL      vLLM computes the checksums of the received tensors before the load
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlhf.core.errors import RunError

HEADER = struct.Struct("<q")  # header of a shared file: the version in the file
NOTHING = -1  # header while the file is written
_POLL_S = 0.01  # seconds between checks whether a version has been released
ALIGNMENT = 64  # bytes; tensors start at multiples of it in the file, so that views are aligned


class TransferError(RunError):
    """An error of a transfer: weights are incomplete or changed; the message names the tensor or version."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a manifest."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # position in the shared file, in bytes; 0 for weights on a GPU
    bytes: int
    checksum: int  # `checksum(tensor)`; for weights on a GPU `transfer.gpu.fingerprint(tensor)`


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one version of the weights. A manifest is small and is sent to the process by pickle."""

    version: int
    path: str  # the shared file with the tensors; empty: the tensors are on a GPU
    entries: tuple[Entry, ...]
    update: dict[str, Any] | None = None  # what vLLM's engine needs besides names, dtypes and shapes
    group: dict[str, Any] | None = None  # NCCL: the group that the process must join first

    def checksums(self) -> dict[str, int]:
        """Return the checksums that the process must confirm, by tensor name."""
        return {entry.name: entry.checksum for entry in self.entries}

    def described(self) -> dict[str, list[Any]]:
        """Return names, dtypes and shapes of the tensors, as vLLM's engines for GPUs read them."""
        return {
            "names": [entry.name for entry in self.entries],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in self.entries],
            "shapes": [list(entry.shape) for entry in self.entries],
        }


class WeightStore(ABC):
    """The trainer's side of a transfer: keeps versions of the weights until the process has loaded them.

        store.wait(2, check)                          wait until fewer than two versions are kept
        manifest = store.write(engine.weights(), 3)   copy the weights; the trainer continues
        manifest = store.offer(manifest, fail)        before the load: return the manifest for the process
        store.finish(manifest)                        the process has confirmed the load
        store.release(manifest)                       the version is no longer needed

    The trainer's thread calls `wait`, `write`, `release` and `close`. The carrier thread of the worker calls
    `release` and all other methods.
    """

    @property
    @abstractmethod
    def kept(self) -> int:
        """The number of versions that are kept."""

    def wait(self, most: int, check: Callable[[], None]) -> None:
        """Wait until fewer than `most` versions are kept.

        Args:
            most: the number of versions, at least 2.
            check: called while waiting; raises an error if the process has failed.
        """
        while self.kept >= most:
            check()
            time.sleep(_POLL_S)

    @abstractmethod
    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy the weights of a version and return their manifest.

        Each tensor is copied before the next one is requested from `weights`, because an engine that gathers
        shards reuses the memory of a tensor for the next one.

        Raises:
            RunError: there is not enough memory.
        """

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Return the manifest to send to the process; a store may start to send the weights here.

        Args:
            manifest: the version to load.
            fail: called from another thread if the weights cannot be sent; `check` then raises the cause.
        """
        return manifest

    def link(self) -> WeightStore:
        """Return what sends the kept versions to one of several processes; by default, this store."""
        return self

    def finish(self, manifest: Manifest) -> None:  # noqa: B027
        """Finish a transfer after the process has confirmed the weights; by default, do nothing."""

    def check(self) -> None:  # noqa: B027
        """Raise RunError if offered weights could not be sent; by default, do nothing."""

    def forget(self) -> None:  # noqa: B027
        """Abandon all transfers to a process that has ended; by default, do nothing."""

    @abstractmethod
    def release(self, manifest: Manifest) -> None:
        """Release a version that is no longer needed."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory of all versions."""


def confirm(manifest: Manifest, version: int, taken: dict[str, int]) -> None:
    """Check that the generator process has loaded the weights that the trainer sent.

    Args:
        manifest: the weights that were sent.
        version: the version that the process reports.
        taken: the checksums that the process reports, by tensor name.

    Raises:
        TransferError: the version differs, or tensors are missing, unknown or different.
    """
    sent = manifest.checksums()
    if version != manifest.version:
        raise TransferError(
            f"the generator must confirm version {manifest.version} (the version that the trainer sent), "
            f"got version {version}"
        )
    for name in sent.keys() | taken.keys():
        if sent.get(name) != taken.get(name):
            raise TransferError(
                f"the generator must hold {name} of version {version} with the checksum "
                f"{shown(sent.get(name))}, as the trainer sent it, got {shown(taken.get(name))}"
            )


def shown(value: int | None) -> str:
    """Return a checksum as text for a message; `value` is None if there is no such tensor."""
    return "none: there is no such tensor" if value is None else f"{value:016x}"


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes, the same on every device.

    The checksum detects corruption, not tampering.
    """
    return digest(raw(tensor))


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in `dtype`; other tensors, and all tensors without a dtype, as given."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; a tensor on a GPU is copied to the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def digest(data: memoryview) -> int:
    """Return the 64-bit XXH3 checksum of bytes, computed in half the time of a copy of the bytes."""
    return xxhash.xxh3_64_intdigest(data)
