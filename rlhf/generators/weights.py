"""The transfer of weights from the trainer to generators: in shared memory or as files."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf.core.errors import RunError

# The interface of weight transfer from the trainer to a generator process: manifest, store and checksums.
#
# A `WeightStore` keeps versions of the weights. The stores are in `rlhf/generators/transfer/`:
# `shared_memory.py` works everywhere, and `gpu.py` keeps versions on a GPU for CUDA IPC and NCCL. A
# `Manifest` lists the tensors of a version with their checksums. The generator process reports the checksums
# of the tensors that it loaded, and `confirm` compares them with the manifest. Origin of the reported
# checksums:
#
#     HF                     `shared_memory.read` verifies the tensors in the file; after the copy, the
#     process computes the checksums again, from the tensors of its model vLLM, shared memory
#     `shared_memory.read` or `files.read_file` verifies the tensors in the file; after or a file
#     the load, vLLM computes the checksums of these tensors again vLLM, IPC or NCCL      vLLM computes the
#     checksums of the received tensors before the load


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


# Weight transfer through shared memory, between processes of one host.
#
# A version of the weights is a file in memory. The generator process maps the file, and rejects a tensor
# whose checksum differs from the manifest:
#
#     shared = SharedWeights()                        # trainer
#     manifest = shared.write(engine.weights(), 3)
#     for name, tensor in read(manifest): ...         # generator: views of the file, to be copied
#     shared.release(manifest)                        # trainer: the file may be overwritten
#
# Several processes may load the same file: `hold` registers one more user, and the file is overwritten only
# after all users have released it.
#
# Weights on a GPU are rounded to the sampler's dtype on the GPU. While a tensor is copied to a pinned buffer,
# a second thread writes the tensor before it to the file and computes its checksum. For weights on the CPU, a
# second thread was not faster.
#
# On Linux the file has no name (memfd). The kernel frees the file when all processes have ended; /dev/shm may
# be smaller than the weights. The generator process opens the file as /proc/<trainer's pid>/fd/<number>. On
# other systems the file is in a temporary folder whose name contains the trainer's pid.


class _Staging:
    """Two buffers in pinned host memory, used in turn. They grow to the size of the largest tensor.

    for tensor in tensors:
        copy = staging.copy(tensor)            # waits for the use of the copy before the last
        staging.used_by(thread.submit(use, copy))
    """

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self.users: list[Future[int] | None] = [None, None]  # the work that reads each buffer
        self.turn = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of `tensor` on the host; it is valid until the call after the next."""
        self.turn = 1 - self.turn
        if (user := self.users[self.turn]) is not None:
            user.result()
        if len(self.buffers[self.turn]) < tensor.nbytes:
            self.buffers[self.turn] = torch.empty(  # pageable only in a test without a GPU
                tensor.nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        copy = self.buffers[self.turn][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach())

    def used_by(self, work: Future[int]) -> None:
        """Note the work that reads the last copy."""
        self.users[self.turn] = work


def _in_host_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in the memory of the host."""
    return tensor.device.type == "cpu"


class SharedWeights(WeightStore):
    """A store of files in shared memory, each with the weights of one version.

    A file is reused after all users of its version have released it. So the number of files is the largest
    number of versions in use at the same time.

    Args:
        dtype: dtype of the floating-point tensors in a file: the dtype to which the sampler would round them;
            None: the tensors keep their dtypes.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.staging = _Staging()
        self.lock = threading.Lock()  # protects `holders`
        self.holders: dict[str, int] = {}  # number of users of each file, by path
        self.files: dict[str, BinaryIO] = {}  # open files, by path
        self.free: deque[str] = deque()  # paths of unused files; another thread may call `release`
        self.folder: str | None = None  # folder of the files on systems without memfd

    @property
    def kept(self) -> int:
        """The number of versions in use."""
        return len(self.files) - len(self.free)

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy the weights of a version into an unused file, one tensor at a time, and return their manifest.

        Raises:
            RunError: there is not enough shared memory.
        """
        path = self.free.pop() if self.free else self.create()
        file, end = self.files[path].fileno(), HEADER.size
        entries: list[Entry] = []
        checksums: list[Future[int]] = []
        try:
            write_at(file, HEADER.pack(NOTHING), 0)
            with ThreadPoolExecutor(1) as thread:
                for name, tensor in weights:
                    tensor = rounded(tensor, self.dtype)
                    offset = -(-end // ALIGNMENT) * ALIGNMENT
                    end = offset + tensor.nbytes
                    entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset, tensor.nbytes, 0))
                    checksums.append(self.add(file, offset, tensor, thread))
                found = [replace(e, checksum=c.result()) for e, c in zip(entries, checksums, strict=True)]
            os.truncate(file, end)
            write_at(file, HEADER.pack(version), 0)
        except OSError as problem:
            raise RunError(
                f"the weights of version {version} must fit into shared memory (the generator process reads "
                f"them from there), got: {problem}; free memory, or set generator.worker=false"
            ) from problem
        self.holders[path] = 1
        return Manifest(version, path, tuple(found))

    def add(self, file: int, offset: int, tensor: Tensor, thread: Executor) -> Future[int]:
        """Write a tensor to the file at `offset`, and return the future of its checksum.

        The tensor may be changed after the method returns.
        """
        if _in_host_memory(tensor):
            checksum: Future[int] = Future()
            checksum.set_result(write_with_checksum(file, raw(tensor), offset))
        else:
            data = raw(self.staging.copy(tensor))
            checksum = thread.submit(write_with_checksum, file, data, offset)
            self.staging.used_by(checksum)
        return checksum

    def hold(self, manifest: Manifest) -> None:
        """Register one more user of a version; each user must release the version once."""
        with self.lock:
            self.holders[manifest.path] += 1

    def create(self) -> str:
        """Create a file and return its path, which any process of the same user can open."""
        if hasattr(os, "memfd_create"):  # Linux
            number = os.memfd_create("rlhf-weights")
            file: BinaryIO = os.fdopen(number, "w+b")
            path = f"/proc/{os.getpid()}/fd/{number}"
        else:
            if self.folder is None:
                self.folder = tempfile.mkdtemp(prefix=f"rlhf-weights-{os.getpid()}-")
            path = os.path.join(self.folder, str(len(self.files)))
            file = open(path, "w+b")  # noqa: SIM115
        self.files[path] = file
        return path

    def release(self, manifest: Manifest) -> None:
        """Release a version for one user; the file can be reused after all its users have released it."""
        with self.lock:
            self.holders[manifest.path] -= 1
            if not self.holders[manifest.path]:
                self.free.append(manifest.path)

    def close(self) -> None:
        """Close and remove all files, which frees their memory."""
        for file in self.files.values():
            file.close()
        for path in self.files:
            remove(path)
        self.files, self.free = {}, deque()


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
                f"{entry.name} of version {version} must reach to byte {entry.offset + entry.bytes} of the "
                f"shared file, got a file of {size} bytes: the file is truncated"
            )
    if written != version:
        raise TransferError(
            f"the shared file must hold version {version}, got "
            + ("a version that is not completely written" if written == NOTHING else f"version {written}")
        )
    memory = torch.from_file(manifest.path, shared=False, size=size, dtype=torch.uint8)
    for entry in manifest.entries:
        data = memory[entry.offset : entry.offset + entry.bytes]
        if (computed := digest(data.numpy().data)) != entry.checksum:
            raise TransferError(
                f"{entry.name} of version {version} must have the checksum {entry.checksum:016x} in the "
                f"shared file, got {computed:016x}: the tensor differs from what the trainer wrote"
            )
        yield entry.name, data.view(entry.dtype).view(entry.shape)


# Weight transfer through safetensors files in a folder that trainer and servers share.
#
#     store = FileWeights(folder, dtype)                # trainer
#     manifest = store.write(engine.weights(), 3)       # folder/step-3.safetensors
#     for name, tensor in read_file(path, 3, sums): ... # server
#     store.release(manifest)                           # trainer: the file is removed
#
# A file is complete as soon as it has its name. A server rejects a tensor whose checksum differs from the one
# that the trainer computed.


class FileWeights(WeightStore):
    """A store of one file for each version of the weights.

    Args:
        folder: where the files are written; it is created, and `close` removes it if nothing else is there.
        dtype: dtype of the floating-point tensors in a file; None: the tensors keep their dtypes.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = folder.absolute(), dtype
        self.versions: set[int] = set()
        self.close()  # the files of a run that was killed

    @property
    def kept(self) -> int:
        """The number of files."""
        return len(self.versions)

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Write the weights of a version to a file, and return their manifest.

        Raises:
            RunError: the file cannot be written.
        """
        tensors = {
            name: rounded(tensor, self.dtype).detach().to("cpu", copy=True).contiguous()
            for name, tensor in weights
        }
        path = self.folder / f"step-{version}.safetensors"
        part = path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part)
            part.rename(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise RunError(
                f"the weights of version {version} must fit into {self.folder} (the servers read them "
                f"there), got: {error}; free space, or set generator.folder=<folder that servers can read>"
            ) from error
        self.versions.add(version)
        entries = (
            Entry(name, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes, checksum(tensor))
            for name, tensor in tensors.items()
        )
        return Manifest(version, str(path), tuple(entries))

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Return the manifest with what a server needs to read the file."""
        given = {"path": manifest.path, "version": manifest.version, "checksums": manifest.checksums()}
        return replace(manifest, update=given)

    def release(self, manifest: Manifest) -> None:
        """Remove the file of a version."""
        Path(manifest.path).unlink(missing_ok=True)
        self.versions.discard(manifest.version)

    def close(self) -> None:
        """Remove all versions."""
        for path in self.folder.glob("step-*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # files of others
            self.folder.rmdir()
        self.versions.clear()


def read_file(path: str, version: int, checksums: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each tensor of a file.

    Raises:
        TransferError: the file cannot be read, its tensors have other names, or a checksum differs.
    """
    try:
        with safe_open(path, "pt") as file:
            if other := set(file.keys()) ^ checksums.keys():
                raise TransferError(
                    f"{path} must have the tensors of version {version} that the trainer wrote, got a "
                    f"difference at {', '.join(sorted(other)[:3])}"
                )
            for name in file.keys():  # noqa: SIM118, it is no dict
                tensor = file.get_tensor(name)
                if (found := checksum(tensor)) != checksums[name]:
                    raise TransferError(
                        f"{name} of version {version} must have the checksum {shown(checksums[name])} in "
                        f"{path}, got {shown(found)}: the tensor differs from what the trainer wrote"
                    )
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise TransferError(
            f"the weights of version {version} cannot be read from {path}: {error}"
        ) from error
