"""Weight transfer from the trainer's GPU to vLLM, by vLLM's engines: CUDA IPC on one GPU, NCCL between GPUs.

For each version, the store copies all tensors to a snapshot on the trainer's GPU. So the trainer can continue
before vLLM has loaded the version. The receiving side is in `rlhf/generators/vllm/worker_extension.py`.

    CudaIpc   the manifest contains a handle of each tensor; vLLM maps the snapshot and copies it
    Nccl      vLLM and a thread of the trainer form a group of 1 + tensor_parallel_size ranks; the thread
              broadcasts the snapshot while vLLM receives it. Each new process gets a new group.

Memory: one snapshot per version that `rlhf.generators.process` keeps, each of the policy's size in vLLM's
dtype, and with NCCL two buffers of BUFFER bytes on each side. The memory of a released snapshot goes back to
the caching allocator, which gives the same blocks to the next snapshot. Unlike a shared file, a snapshot is
never overwritten, because torch counts the readers of memory that is exported by CUDA IPC, one per export.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlhf.core.errors import RunError
from rlhf.core.launched import local_world_size, world_size
from rlhf.generators.weights import Entry, Manifest, WeightStore, dtype_name

Weights = list[tuple[str, Tensor]]  # name and tensor

BUFFER = 256 << 20  # minimum number of bytes packed into one broadcast; two broadcasts overlap
CHUNK = 1 << 22  # elements per step of a fingerprint; a step needs two temporary tensors of 32 MiB

# Integer dtype that has the bits of an element, by element size in bytes; 16 bytes count as two elements.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
STEP = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio; STEP, FACTORS: constants of SplitMix64, signed
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
        x += torch.arange(first + 1, first + 1 + len(x), device=x.device).mul_(STEP)
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
        self.device = device
        self.dtype = dtype
        self.snapshots: dict[int, Weights] = {}

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
        copies: Weights = []
        sums = {}
        try:
            for name, tensor in weights:
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                copy = torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor.detach())
                copies.append((name, copy))
                sums[name] = fingerprint(copy)
            values = checksums(sums)  # also waits until the copies are complete
        except torch.OutOfMemoryError as problem:
            raise RunError(
                f"the weights of version {version} must fit a second time into the trainer's GPU (the "
                f"generator process reads them from there), got: {problem}; free memory, or set "
                "generator.transfer=shared_memory"
            ) from problem
        self.snapshots[version] = copies
        return Manifest(
            version,
            "",
            tuple(
                Entry(name, dtype_name(x), tuple(x.shape), 0, x.nbytes, values[name]) for name, x in copies
            ),
        )

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
        self.sender: Sender | None = None  # thread that sends to the current process

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Queue the snapshot for sending and return the manifest; `fail` is called if sending fails.

        The first manifest for a process contains the group that the process must join.
        """
        group = None
        if self.sender is None:
            group = self.new_group()
            self.sender = Sender(self, group, fail)
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

    def broadcast(self, communicator: Any, weights: Weights) -> None:
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


class Sender(threading.Thread):
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
        self.store = store
        self.group = group
        self.fail = fail
        self.todo: SimpleQueue[Weights | None] = SimpleQueue()  # snapshots to send; None ends the thread
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
