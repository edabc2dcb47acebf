"""The transfer of weights from the trainer to generators: as files, by CUDA IPC, and by NCCL."""

from __future__ import annotations

import base64
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlhf.core.errors import RunError
from rlhf.core.launched import local_world_size, world_size

# The interface of weight transfer from the trainer to a generator process: manifest, store and checksums.
#
# A `WeightStore` keeps versions of the weights: `SharedWeights` in files, which works everywhere, and the
# stores `CudaIpc` and `Nccl` of snapshots on a GPU. A `Manifest` lists the tensors
# of a version with their checksums. The generator process reports the checksums of the tensors that it
# loaded, and `confirm` compares them with the manifest. Origin of the reported checksums:
#
#     HF                  `read` verifies the tensors in the file; after the copy, the process computes the
#                         checksums again, from the tensors of its model
#     vLLM, file          `read` verifies the tensors in the file; after the load, vLLM computes the checksums
#                         of these tensors again
#     vLLM, IPC or NCCL   vLLM computes the checksums of the received tensors before the load


_POLL_S = 0.01  # seconds between checks whether a version has been released
_ALIGNMENT = 64  # bytes; tensors start at multiples of it in the file, so that views are aligned


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


def _entry_of(name: str, tensor: Tensor, offset: int = 0, checksum: int = 0) -> Entry:
    """Return the entry of a tensor in a manifest."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes, checksum)


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
    if version != manifest.version:
        raise TransferError(
            f"the generator must confirm version {manifest.version} (the version that the trainer sent), "
            f"got version {version}"
        )
    sent = manifest.checksums()
    for name in sent.keys() | taken.keys():
        ours, theirs = (f"{sums[name]:016x}" if name in sums else "no tensor" for sums in (sent, taken))
        if ours != theirs:
            raise TransferError(
                f"the generator must hold {name} of version {version} with the checksum {ours}, as the "
                f"trainer sent it, got {theirs}"
            )


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes, the same on every device.

    The checksum detects corruption, not tampering.
    """
    return _digest(_raw(tensor))


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order; a tensor on a GPU is copied to the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _digest(data: memoryview) -> int:
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
        end = 0
        entries: list[Entry] = []
        sums: list[Future[int]] = []
        try:
            path = self.free.pop() if self.free else self.create(version)
            with open(path, "r+b", buffering=0) as file, ThreadPoolExecutor(1) as thread:
                for name, tensor in weights:
                    if self.dtype is not None and tensor.is_floating_point():
                        tensor = tensor.detach().to(self.dtype)
                    offset = -(-end // _ALIGNMENT) * _ALIGNMENT
                    end = offset + tensor.nbytes
                    entries.append(_entry_of(name, tensor, offset))
                    host = _in_host_memory(tensor)
                    data = _raw(tensor if host else self.staged(tensor, sums))
                    sums.append(thread.submit(write_at, file.fileno(), data, offset))
                    if host:
                        sums[-1].result()  # the engine may reuse the memory of the tensor
                found = [replace(e, checksum=s.result()) for e, s in zip(entries, sums, strict=True)]
                file.truncate(end)
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


def write_at(file: int, data: memoryview, offset: int) -> int:
    """Write bytes to a file at `offset`, and return their checksum.

    Raises:
        OSError: the file cannot grow.
    """
    left = data
    while left:
        written = os.pwrite(file, left, offset)  # at most 2 GiB
        left, offset = left[written:], offset + written
    return _digest(data)


def read(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each entry of a manifest from its shared file.

    The tensors are views of the file, on the CPU. The caller must copy them before the version is released.

    Raises:
        TransferError: the file cannot be read, or the checksum of a tensor differs from the manifest, because
            the file is damaged, truncated or has another version.
    """
    version = manifest.version
    try:
        size = os.path.getsize(manifest.path)
        memory = torch.from_file(manifest.path, shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as problem:
        raise TransferError(f"the weights of version {version} cannot be read: {problem}") from problem
    for entry in manifest.entries:
        data = memory[entry.offset : entry.offset + entry.bytes]
        if (computed := _digest(data.numpy().data)) != entry.checksum:
            raise TransferError(
                f"{entry.name} of version {version} must have the checksum {entry.checksum:016x} in its "
                f"{entry.bytes} bytes of {manifest.path}, got {computed:016x} in {len(data)} bytes: the "
                "tensor differs from what the trainer wrote"
            )
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)


# Weight transfer from the trainer's GPU to vLLM, by vLLM's engines.
#
# For each version, the store copies all tensors to a snapshot on the trainer's GPU. So the trainer can
# continue before vLLM has loaded the version. The receiving side is in
# `rlhf/generators/vllm/worker_extension.py`.
#
#     CudaIpc   the manifest contains a handle of each tensor; vLLM maps the snapshot and copies it
#     Nccl      vLLM and a thread of the trainer form a group of 1 + tensor_parallel_size ranks; the thread
#               broadcasts the snapshot while vLLM receives it. Each new process gets a new group.
#
# Memory: one snapshot per version that `rlhf.generators.process` keeps, each of the policy's size in vLLM's
# dtype, and with NCCL two buffers of BUFFER bytes on each side. The memory of a released snapshot goes back
# to the caching allocator, which gives the same blocks to the next snapshot. Unlike a shared file, a snapshot
# is never overwritten, because torch counts the readers of memory that is exported by CUDA IPC, one per
# export.


_Weights = list[tuple[str, Tensor]]  # name and tensor

BUFFER = 256 << 20  # minimum number of bytes packed into one broadcast; two broadcasts overlap
CHUNK = 1 << 22  # elements per step of a fingerprint; a step needs two temporary tensors of 32 MiB

# Integer dtype that has the bits of an element, by element size in bytes; 16 bytes count as two elements.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_STEP = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio; STEP, FACTORS: constants of SplitMix64, signed
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum ([] int64) of a tensor's bits, computed on the tensor's device.

        start(type, shape) + sum over elements i of mix(bits_i + (i + 1) STEP)    mod 2^64

    `mix` is a finaliser like that of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit numbers.
    So a change of a single element always changes the sum. Several elements that are changed, moved or
    swapped leave the sum unchanged with a probability of about 2^-64. The checksum detects corruption, not
    tampering. It is the same on every device. The computation takes about ten passes over 8 bytes per
    element, and copies nothing to the host.
    """
    numbers = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    start = xxhash.xxh3_64_intdigest(f"{tensor.dtype} {tuple(tensor.shape)}".encode()) - 2**63
    total = torch.full((), start, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(numbers), CHUNK):
        x = numbers[first : first + CHUNK].to(torch.int64, copy=True)
        x += torch.arange(first + 1, first + 1 + len(x), device=x.device).mul_(_STEP)
        for factor in _FACTORS:
            x ^= (x >> 31) & (2**33 - 1)  # a logical shift: the mask clears the sign bits
            x *= factor
        x ^= (x >> 31) & (2**33 - 1)
        total += x.sum()
    return total


def checksums(sums: dict[str, Tensor]) -> dict[str, int]:
    """Return the fingerprints `sums` as unsigned 64-bit numbers by name, with a single copy from the GPU."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: value % 2**64 for name, value in zip(sums, values, strict=True)}


class GpuWeights(WeightStore):
    """A store of snapshots on the trainer's device. Subclasses send the snapshots to the process.

    Args:
        device: the trainer's GPU.
        dtype: dtype of the floating-point tensors of a snapshot: the dtype to which vLLM rounds the weights
            when it loads them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.snapshots: dict[int, _Weights] = {}

    @property
    def kept(self) -> int:
        """The number of snapshots."""
        return len(self.snapshots)

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy the weights of a version to a snapshot, one tensor at a time, and return their manifest.

        When the method returns, the copies are complete for readers on any CUDA stream.

        Raises:
            RunError: there is not enough memory.
        """
        copies: _Weights = []
        try:
            for name, tensor in weights:
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                copy = torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor.detach())
                copies.append((name, copy))
            sums = {name: fingerprint(copy) for name, copy in copies}
            values = checksums(sums)  # also waits until the copies are complete
        except torch.OutOfMemoryError as problem:
            raise RunError(
                f"the weights of version {version} must fit a second time into the trainer's GPU, got: "
                f"{problem}; free memory, or set generator.transfer=shared_memory"
            ) from problem
        self.snapshots[version] = copies
        return Manifest(version, "", tuple(_entry_of(name, x, 0, values[name]) for name, x in copies))

    def release(self, manifest: Manifest) -> None:
        """Return the memory of a version to the caching allocator."""
        self.snapshots.pop(manifest.version, None)

    def close(self) -> None:
        """Abandon all transfers and free the memory of all versions."""
        self.forget()
        self.snapshots.clear()


class CudaIpc(GpuWeights):
    """A store that sends snapshots to a process on the same GPU by CUDA IPC."""

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Return the manifest with CUDA IPC handles of the snapshot's tensors, for one reader."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for _, tensor in self.snapshots[manifest.version]]
        return replace(manifest, update={"ipc_handles": handles})

    def finish(self, manifest: Manifest) -> None:
        """Let torch collect the shared memory whose CUDA IPC handles the reader has closed."""
        torch.cuda.ipc_collect()


class Nccl(GpuWeights):
    """A store that sends snapshots to a process on other GPUs by NCCL.

    The identity of the NCCL group is sent through the socket between trainer and process. Only NCCL itself
    opens ports. If the trainer runs on one host and NCCL_SOCKET_IFNAME is not set, NCCL uses the loopback
    interface.

    Args:
        device: the trainer's GPU.
        dtype: dtype of the floating-point tensors of a snapshot.
        workers: number of ranks of vLLM, one per GPU.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, workers: int) -> None:
        super().__init__(device, dtype)
        self.workers = workers
        self.sender: _Sender | None = None  # thread that sends to the current process

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Queue the snapshot for sending and return the manifest; `fail` is called if sending fails.

        The first manifest for a process contains the group that the process must join.
        """
        group = None
        if self.sender is None:
            group = self.new_group()
            self.sender = _Sender(self, group, fail)
            self.sender.start()
        self.sender.todo.put(self.snapshots[manifest.version])
        return replace(manifest, update={}, group=group)

    def link(self) -> Nccl:
        """Return a store with the same snapshots for another process, which joins another group."""
        return copy(self)

    def finish(self, manifest: Manifest) -> None:
        """Wait until the snapshot is sent completely.

        Raises:
            RunError: the snapshot could not be sent.
        """
        assert self.sender is not None, "finish requires a preceding offer"
        done = self.sender.done
        while self.sender is not None:
            try:
                return done.get(timeout=0.1)
            except Empty:
                self.check()
        raise RunError(f"the weights of version {manifest.version} must be sent, but were abandoned")

    def check(self) -> None:
        """Raise RunError if a snapshot could not be sent."""
        if self.sender is not None and (error := self.sender.error) is not None:
            raise RunError(
                f"the trainer must be able to send weights by NCCL, got {type(error).__name__}: {error}; "
                "set NCCL_DEBUG=INFO to see why, or generator.transfer=shared_memory"
            ) from error

    def forget(self) -> None:
        """Abandon all transfers and leave the group."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.abandon()

    def new_group(self) -> dict[str, Any]:
        """Return the data with which vLLM's ranks join a new group, in the format of vLLM's engine."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        if world_size() == local_world_size():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        identity = bytes(NCCLLibrary().ncclGetUniqueId())
        return {
            "nccl_unique_id_b64": base64.b64encode(identity).decode(),
            "rank_offset": 1,  # rank 0 is the trainer
            "world_size": 1 + self.workers,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER,
            "packed_num_buffers": 2,
        }

    def join(self, group: dict[str, Any]) -> Any:
        """Join the group as rank 0, wait for the other ranks, and return vLLM's communicator."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        torch.cuda.set_device(self.device)  # the current device is set per thread
        identity = base64.b64decode(group["nccl_unique_id_b64"])
        index = torch.cuda.current_device()
        return uid_init_process_group(identity, rank=0, world_size=group["world_size"], device=index)

    def broadcast(self, communicator: Any, weights: _Weights) -> None:
        """Send a snapshot to all ranks in the format of vLLM's engine, and wait until it is sent."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=communicator,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=BUFFER,
            num_buffers=2,
        )


class _Sender(threading.Thread):
    """A thread that sends snapshots to one process, first in, first out.

    A broadcast waits for the process, which may be busy with a request. The thread waits, so the trainer need
    not wait. The thread is a daemon because NCCL waits forever if the process dies before it joins the group.

    Args:
        store: the store whose snapshots are sent.
        group: the data of the group that trainer and process join, from `Nccl.new_group`.
        fail: called if sending fails.
    """

    def __init__(self, store: Nccl, group: dict[str, Any], fail: Callable[[], None]) -> None:
        super().__init__(name="weights", daemon=True)
        self.store, self.group, self.fail = store, group, fail
        self.todo: SimpleQueue[_Weights | None] = SimpleQueue()  # snapshots to send; None ends the thread
        self.done: SimpleQueue[None] = SimpleQueue()  # one item per snapshot that was sent
        self.error: BaseException | None = None
        self.communicator: Any = None
        self.abandoned = False
        self.lock = threading.Lock()  # protects `communicator` and `abandoned`

    def run(self) -> None:
        """Join the group, then send each queued snapshot until the queue yields None.

        After an error, record the error, and call `fail` unless the transfer was abandoned.
        """
        try:
            communicator = self.store.join(self.group)
            with self.lock:
                self.communicator = communicator
                if self.abandoned:
                    communicator.destroy()
            while (weights := self.todo.get()) is not None and not self.abandoned:
                self.store.broadcast(communicator, weights)
                del weights  # otherwise this reference keeps the last snapshot in memory
                self.done.put(None)
        except BaseException as error:
            self.error = error
            if not self.abandoned:
                self.fail()

    def abandon(self) -> None:
        """End the thread and abort a running broadcast."""
        self.todo.put(None)
        with self.lock:
            self.abandoned = True
            if self.communicator is not None:
                self.communicator.destroy()
