"""The transfer of weights from the trainer to generators, as files in memory or in a folder."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlhf.core.errors import RunError

# The interface of weight transfer from the trainer to a generator process: manifest, store and checksums.
#
# A `WeightStore` keeps versions of the weights: `SharedWeights` in files, which works everywhere, and the
# stores of `rlhf/generators/weights_gpu.py` on a GPU, for CUDA IPC and NCCL. A `Manifest` lists the tensors
# of a version with their checksums. The generator process reports the checksums of the tensors that it
# loaded, and `confirm` compares them with the manifest. Origin of the reported checksums:
#
#     HF                  `read` verifies the tensors in the file; after the copy, the process computes the
#                         checksums again, from the tensors of its model
#     vLLM, file          `read` verifies the tensors in the file; after the load, vLLM computes the checksums
#                         of these tensors again
#     vLLM, IPC or NCCL   vLLM computes the checksums of the received tensors before the load


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
    dtype: str  # such as "float32"
    shape: tuple[int, ...]
    offset: int  # position in the shared file, in bytes; 0 for weights on a GPU
    bytes: int
    checksum: int = 0  # `checksum(tensor)`; of weights on a GPU, their `fingerprint`


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one version of the weights. A manifest is small and is sent to the process by pickle."""

    version: int
    path: str  # the shared file with the tensors; empty: the tensors are on a GPU
    entries: tuple[Entry, ...]
    update: dict[str, Any] | None = None  # on a GPU: what vLLM needs besides names, dtypes and shapes
    group: dict[str, Any] | None = None  # NCCL: the group that the process must join first

    def checksums(self) -> dict[str, int]:
        """Return the checksums that the process must confirm, by tensor name."""
        return {entry.name: entry.checksum for entry in self.entries}

    def update_info(self) -> dict[str, Any]:
        """Return the data with which an engine of vLLM receives the tensors; it can be sent as JSON."""
        if self.update is None:
            entries = [astuple(entry) for entry in self.entries]
            return {"path": self.path, "version": self.version, "entries": entries}
        return {
            "names": [entry.name for entry in self.entries],
            "dtype_names": [entry.dtype for entry in self.entries],
            "shapes": [list(entry.shape) for entry in self.entries],
            **self.update,
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


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; a tensor on a GPU is copied to the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype of a tensor without the prefix `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def digest(data: memoryview) -> int:
    """Return the 64-bit XXH3 checksum of bytes, computed in half the time of a copy of the bytes."""
    return xxhash.xxh3_64_intdigest(data)


# Weight transfer through files, in memory or in a folder.
#
# A version of the weights is a file. The generator process or the server maps the file, and rejects a tensor
# whose checksum differs from the manifest:
#
#     shared = SharedWeights()                        # trainer
#     manifest = shared.write(engine.weights(), 3)
#     for name, tensor in read(manifest): ...         # generator: views of the file, to be copied
#     shared.release(manifest)                        # trainer: the file may be overwritten
#
# Several processes may load the same file: `hold` registers one more user, and the file is overwritten or
# removed only after all users have released it.
#
# Weights on a GPU are rounded to the sampler's dtype on the GPU. While a tensor is copied to a pinned buffer,
# a second thread writes the tensor before it to the file and computes its checksum. For weights on the CPU, a
# second thread was not faster.
#
# Without a folder, the file is in memory. On Linux it has no name (memfd): the kernel frees the file when all
# processes have ended; /dev/shm may be smaller than the weights. The generator process opens the file as
# /proc/<trainer's pid>/fd/<number>. On other systems the file is in a temporary folder whose name contains
# the trainer's pid.


def _in_host_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in the memory of the host."""
    return tensor.device.type == "cpu"


class SharedWeights(WeightStore):
    """A store of files, each with the weights of one version.

    A file in memory is reused after all users of its version have released it. So the number of these files
    is the largest number of versions in use at the same time. A file in a folder is removed, because a
    network file system may show other hosts the old content of a file that is overwritten.

    Args:
        dtype: dtype of the floating-point tensors in a file: the dtype to which the sampler would round them;
            None: the tensors keep their dtypes.
        folder: where the files are, so that servers on other hosts can read them; it is created, and `close`
            removes it if nothing else is there. None: in memory.
    """

    def __init__(self, dtype: torch.dtype | None = None, folder: Path | None = None) -> None:
        self.dtype = dtype
        self.reuses = folder is None
        self.folder = None if folder is None else folder.absolute()
        self.staging = [torch.empty(0, dtype=torch.uint8)] * 2  # buffers that grow to the largest tensor
        self.lock = threading.Lock()  # protects `holders` and `free`
        self.holders: dict[str, int] = {}  # number of users of each file in use, by path
        self.free: list[str] = []  # paths of unused files
        self.nameless: list[int] = []  # descriptors of files without a name
        self.close()  # removes the files of a run that was killed

    @property
    def kept(self) -> int:
        """The number of versions in use."""
        return len(self.holders)

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy the weights of a version into an unused file, one tensor at a time, and return their manifest.

        Raises:
            RunError: there is not enough memory, or the file cannot be written.
        """
        end = HEADER.size
        entries: list[Entry] = []
        sums: list[Future[int]] = []
        try:
            path = self.free.pop() if self.free else self.create(version)
            with open(path, "r+b", buffering=0) as file, ThreadPoolExecutor(1) as thread:
                write_at(file.fileno(), HEADER.pack(NOTHING), 0)
                for name, tensor in weights:
                    if self.dtype is not None and tensor.is_floating_point():
                        tensor = tensor.detach().to(self.dtype)
                    offset = -(-end // ALIGNMENT) * ALIGNMENT
                    end = offset + tensor.nbytes
                    entries.append(
                        Entry(name, dtype_name(tensor), tuple(tensor.shape), offset, tensor.nbytes)
                    )
                    if _in_host_memory(tensor):
                        sums.append(Future())
                        sums[-1].set_result(write_with_checksum(file.fileno(), raw(tensor), offset))
                    else:
                        data = raw(self.staged(tensor, sums))
                        sums.append(thread.submit(write_with_checksum, file.fileno(), data, offset))
                found = [replace(e, checksum=s.result()) for e, s in zip(entries, sums, strict=True)]
                file.truncate(end)
                write_at(file.fileno(), HEADER.pack(version), 0)
        except OSError as problem:
            where, remedy = "shared memory", "free memory, or set generator.worker=false"
            if not self.reuses:
                where = str(self.folder)
                with suppress(OSError):
                    Path(self.folder or "", f"step-{version}").unlink()
                remedy = "free space, or set generator.folder=<folder that servers can read>"
            raise RunError(
                f"the weights of version {version} must fit into {where} (the generator reads them from "
                f"there), got: {problem}; {remedy}"
            ) from problem
        self.holders[path] = 1
        return Manifest(version, path, tuple(found))

    def staged(self, tensor: Tensor, sums: list[Future[int]]) -> Tensor:
        """Return a copy of a tensor in one of two buffers on the host, after the buffer's last use has ended.

        Args:
            tensor: a tensor on a GPU.
            sums: the work that uses the copies before.
        """
        if len(sums) > 1:
            sums[-2].result()
        turn = len(sums) % 2
        if len(self.staging[turn]) < tensor.nbytes:
            self.staging[turn] = torch.empty(  # pageable only in a test without a GPU
                tensor.nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        copy = self.staging[turn][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach())

    def hold(self, manifest: Manifest) -> None:
        """Register one more user of a version; each user must release the version once."""
        with self.lock:
            self.holders[manifest.path] += 1

    def create(self, version: int) -> str:
        """Create a file and return its path, which any process of the same user can open."""
        if self.reuses and hasattr(os, "memfd_create"):  # Linux
            self.nameless.append(os.memfd_create("rlhf-weights"))
            return f"/proc/{os.getpid()}/fd/{self.nameless[-1]}"
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix=f"rlhf-weights-{os.getpid()}-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{version}"
        path.touch()
        return str(path)

    def release(self, manifest: Manifest) -> None:
        """Release a version for one user; the file is reused or removed after all users have released it."""
        with self.lock:
            self.holders[manifest.path] -= 1
            if self.holders[manifest.path]:
                return
            if self.reuses:
                self.free.append(manifest.path)
            else:
                Path(manifest.path).unlink(missing_ok=True)
            del self.holders[manifest.path]  # last: `kept` counts the files that exist

    def close(self) -> None:
        """Remove all files, which frees their memory."""
        for descriptor in self.nameless:
            os.close(descriptor)
        if self.folder is not None:
            for path in self.folder.glob("step-*"):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # files of others
                self.folder.rmdir()
        self.holders, self.free, self.nameless = {}, [], []


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes to a file at `offset`.

    Raises:
        OSError: the file cannot grow.
    """
    while data:
        written = os.pwrite(file, data, offset)  # at most 2 GiB
        data, offset = memoryview(data)[written:], offset + written


def write_with_checksum(file: int, data: memoryview, offset: int) -> int:
    """Write bytes to a file at `offset`, and return their checksum."""
    write_at(file, data, offset)
    return digest(data)


def remove(path: str) -> None:
    """Remove the folder of shared files that contains `path`.

    Files without a name (memfd) need no removal: the kernel frees them.
    """
    if not path.startswith("/proc/"):
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def read(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each entry of a manifest from its shared file.

    The tensors are views of the file, on the CPU. The caller must copy them before the version is released.

    Raises:
        TransferError: the file cannot be read, is truncated or has another version, or the checksum of a
            tensor differs from the manifest.
    """
    version = manifest.version
    try:
        with open(manifest.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
    except OSError as problem:
        raise TransferError(f"the weights of version {version} cannot be read: {problem}") from problem
    written = HEADER.unpack(head)[0] if len(head) == HEADER.size else NOTHING
    for entry in manifest.entries:
        if entry.offset + entry.bytes > size:
            raise TransferError(
                f"{entry.name} of version {version} must reach to byte {entry.offset + entry.bytes} of "
                f"{manifest.path}, got a file of {size} bytes: the file is truncated"
            )
    if written != version:
        raise TransferError(
            f"{manifest.path} must hold version {version}, got "
            + ("a version that is not completely written" if written == NOTHING else f"version {written}")
        )
    memory = torch.from_file(manifest.path, shared=False, size=size, dtype=torch.uint8)
    for entry in manifest.entries:
        data = memory[entry.offset : entry.offset + entry.bytes]
        if (computed := digest(data.numpy().data)) != entry.checksum:
            raise TransferError(
                f"{entry.name} of version {version} must have the checksum {entry.checksum:016x} in "
                f"{manifest.path}, got {computed:016x}: the tensor differs from what the trainer wrote"
            )
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)
