"""Weight transfer through shared memory, between processes of one host.

A version of the weights is a file in memory. The generator process maps the file, and rejects a tensor whose
checksum differs from the manifest:

    shared = SharedWeights()                        # trainer
    manifest = shared.write(engine.weights(), 3)
    for name, tensor in read(manifest): ...         # generator: views of the file, to be copied
    shared.release(manifest)                        # trainer: the file may be overwritten

Several processes may load the same file: `hold` registers one more user, and the file is overwritten only
after all users have released it.

Weights on a GPU are rounded to the sampler's dtype on the GPU. While a tensor is copied to a pinned buffer, a
second thread writes the tensor before it to the file and computes its checksum. For weights on the CPU, a
second thread was not faster.

On Linux the file has no name (memfd). The kernel frees the file when all processes have ended; /dev/shm may
be smaller than the weights. The generator process opens the file as /proc/<trainer's pid>/fd/<number>. On
other systems the file is in a temporary folder whose name contains the trainer's pid.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import BinaryIO

import torch
from torch import Tensor

from rlhf.core.errors import RunError
from rlhf.generators.transfer.weights import (
    ALIGNMENT,
    HEADER,
    NOTHING,
    Entry,
    Manifest,
    TransferError,
    WeightStore,
    digest,
    raw,
    rounded,
)


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
