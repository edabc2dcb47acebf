"""Weight transfer from the trainer's GPU to vLLM, by vLLM's engines: CUDA IPC on one GPU, NCCL between GPUs.

A version is a snapshot on the trainer's GPU, a copy of each tensor. So the trainer continues while the
version waits for its load. The receiving side is in `rlhf/generators/vllm/worker_extension.py`.

    CudaIpc   the manifest contains a handle of each tensor; vLLM maps the snapshot and copies it
    Nccl      vLLM and a thread of the trainer form a group of 1 + tensor_parallel_size ranks; the thread
              broadcasts the snapshot while vLLM receives it. Each new process gets a new group.

Memory: one snapshot per version that `rlhf.generators.worker` keeps, each of the policy's size in vLLM's
dtype, and with NCCL two buffers of BUFFER bytes on each side. A released snapshot goes back to the caching
allocator, which gives the same blocks to the next snapshot. A snapshot is never overwritten, unlike a shared
file, because torch counts the readers of memory that is exported by CUDA IPC: each export has one reader.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlhf.core.errors import RunError
from rlhf.core.launched import local_world_size, world_size
from rlhf.generators.transfer.weights import Entry, Manifest, WeightStore

Weights = list[tuple[str, Tensor]]  # name and tensor

BUFFER = 256 << 20  # least number of bytes packed into one broadcast; two broadcasts overlap
CHUNK = 1 << 22  # elements whose fingerprint is computed at a time; two temporaries of 32 MiB each

# Integer dtype that has the bits of an element, by element size in bytes; 16 bytes count as two elements.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
STEP = 0x9E3779B97F4A7C15 - 2**64  # golden ratio; STEP and FACTORS as in SplitMix64, as signed numbers
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum ([] int64) of a tensor's bits, computed on its device, the same on every device.

        start(type, shape) + sum over elements i of mix(bits_i + (i + 1) STEP)    mod 2^64

    `mix` is a finaliser like that of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit numbers.
    So a change of a single element always changes the sum. Several elements that are changed, moved or
    swapped leave the sum unchanged with a probability of about 2^-64. The checksum detects corruption, not
    tampering. It costs about ten passes over 8 bytes per element, and no copy to the host.
    """
    numbers = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
    start = xxhash.xxh3_64_intdigest(f"{tensor.dtype} {tuple(tensor.shape)}".encode()) - 2**63
    total = torch.full((), start, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(numbers), CHUNK):
        x = numbers[first : first + CHUNK].to(torch.int64, copy=True)
        x += torch.arange(first + 1, first + 1 + len(x), device=x.device).mul_(STEP)
        for factor in FACTORS:
            x ^= (x >> 31) & (2**33 - 1)  # a logical shift: zeros come in from the left
            x *= factor
        x ^= (x >> 31) & (2**33 - 1)
        total += x.sum()
    return total


def checksums(sums: dict[str, Tensor]) -> dict[str, int]:
    """Return fingerprints by name as unsigned 64-bit numbers, with a single copy from the GPU."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: value % 2**64 for name, value in zip(sums, values, strict=True)}


class GpuWeights(WeightStore):
    """A store of snapshots on the trainer's device. Subclasses send the snapshots to the process.

    Args:
        device: the trainer's GPU.
        dtype: dtype of the floating-point tensors of a snapshot: the dtype of vLLM, which would round the
            weights to it anyway.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.snapshots: dict[int, Weights] = {}

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy the weights of a version on the GPU, one tensor at a time, and return their manifest.

        The copies are complete, for readers on any stream, when the method returns.

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
            tuple(Entry(name, x.dtype, tuple(x.shape), 0, x.nbytes, values[name]) for name, x in copies),
        )

    def release(self, manifest: Manifest) -> None:
        """Free the memory of a version, which goes back to the caching allocator."""
        self.snapshots.pop(manifest.version, None)

    def close(self) -> None:
        """Abandon all transfers and free the memory of all versions."""
        self.forget()
        self.snapshots.clear()


class CudaIpc(GpuWeights):
    """A store that sends snapshots to a process on the same GPU by CUDA IPC."""

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Return the manifest with handles of the snapshot's tensors, for one reader."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for _, tensor in self.snapshots[manifest.version]]
        return replace(manifest, update={"ipc_handles": handles})

    def finish(self, manifest: Manifest) -> None:
        """Let torch notice that the reader has closed the handles."""
        torch.cuda.ipc_collect()


class Nccl(GpuWeights):
    """A store that sends snapshots to a process on other GPUs by NCCL.

    The identity of the group is sent through the socket between trainer and process. No port is opened except
    by NCCL itself, on the loopback interface if the trainer runs on one host.

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

    def finish(self, manifest: Manifest) -> None:
        """Wait until the snapshot is sent completely."""
        assert self.sender is not None, "finish requires a preceding offer"
        while True:
            try:
                return self.sender.done.get(timeout=0.1)
            except Empty:
                self.check()

    def check(self) -> None:
        """Raise RunError if the snapshot could not be sent."""
        if self.sender is not None and (error := self.sender.error) is not None:
            raise RunError(
                f"the trainer must be able to send weights by NCCL, got {type(error).__name__}: {error}; "
                "set NCCL_DEBUG=INFO to see why, or generator.transfer=shared_memory"
            ) from error

    def forget(self) -> None:
        """Abandon all transfers and leave the group."""
        if self.sender is not None:
            self.sender.abandon()
            self.sender = None

    def new_group(self) -> dict[str, Any]:
        """Return the information with which vLLM's ranks join a new group, in the format of vLLM's engine."""
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

    A collective waits for the process, which may be busy with a request, so it must not block the trainer.
    The thread is a daemon because NCCL waits forever if the process dies before it joins the group.

    Args:
        store: the store whose snapshots are sent.
        group: the group that trainer and process join.
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
        """Join the group, then send each queued snapshot until the queue yields None."""
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
        """End the thread; a running collective is aborted."""
        self.todo.put(None)
        with self.lock:
            self.abandoned = True
            if self.communicator is not None:
                self.communicator.destroy()
