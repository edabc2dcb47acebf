"""Weights from the trainer's GPU to vLLM's, by vLLM's own engines: CUDA IPC on one GPU, NCCL between GPUs.

A version is a snapshot on the trainer's GPU, a copy of each tensor, so that the trainer goes on training
while the version waits for its turn. The process holds the other half (`rlhf/generators/vllm_worker.py`):

    CudaIpc   the manifest carries a handle of each tensor; vLLM maps the snapshot and copies it
    Nccl      vLLM and a thread of the trainer form a group of 1 + tensor_parallel_size ranks; that thread
              broadcasts the snapshot while vLLM receives it. A new process makes a new group.

Memory: as many snapshots as `rlhf.generators.worker` keeps versions, each of the policy's size in the type
that vLLM computes in, and with NCCL two buffers of BUFFER bytes at each end. A released snapshot goes back to
the caching allocator, which gives the same blocks to the next one. It is not written again, as a shared file
is, because torch counts the readers of memory that goes through CUDA IPC: each export has one.
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
from rlhf.generators.transfer.weights import Entry, Manifest, WeightStore

Weights = list[tuple[str, Tensor]]


BUFFER = 256 << 20  # bytes that are packed into one broadcast, at least; two are under way


CHUNK = 1 << 22  # elements whose fingerprint is computed at once; 32 MiB each of two temporaries


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by element size


STEP = 0x9E3779B97F4A7C15 - 2**64  # golden ratio; this and the next two as in SplitMix64, signed


FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def fingerprint(tensor: Tensor) -> Tensor:
    """[] int64: a checksum of a tensor's bits, computed where it lies, the same on every device.

        start(type, shape) + sum over elements i of mix(bits_i + (i + 1) STEP)    mod 2^64

    `mix` is a finaliser like that of SplitMix64 (Steele, Lea and Flood 2014), one to one on 64 bits. So one
    element that changed, in whatever bits, always changes the sum; several that changed, moved or were
    swapped leave it as it is with a probability of about 2^-64. Against accidents, not against intent. Costs
    some ten passes over 8 bytes an element, and no copy to the host.
    """
    words = tensor.detach().contiguous().reshape(-1).view(WORDS[tensor.element_size()])
    start = xxhash.xxh3_64_intdigest(f"{tensor.dtype} {tuple(tensor.shape)}".encode()) - 2**63
    total = torch.full((), start, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), CHUNK):
        x = words[first : first + CHUNK].to(torch.int64, copy=True)
        x += torch.arange(first + 1, first + 1 + len(x), device=x.device).mul_(STEP)
        for factor in FACTORS:
            x ^= (x >> 31) & (2**33 - 1)  # a shift that brings in zeros
            x *= factor
        x ^= (x >> 31) & (2**33 - 1)
        total += x.sum()
    return total


def checksums(sums: dict[str, Tensor]) -> dict[str, int]:
    """Fingerprints by name as numbers of 64 bits, copied from the GPU at once."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: value % 2**64 for name, value in zip(sums, values, strict=True)}


class GpuWeights(WeightStore):
    """Snapshots on the trainer's device, by version. How they go from there is up to what derives from it.

    Args:
        device: the trainer's GPU.
        dtype: of the floating-point tensors of a snapshot: that of vLLM, which would round them to it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.snapshots: dict[int, Weights] = {}

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy `weights` on the GPU, one tensor at a time, each before the next is asked for; returns when
        the copies are there, for readers on any stream.

        Raises:
            RunError: there is not enough memory.
        """
        kept: Weights = []
        sums = {}
        try:
            for name, tensor in weights:
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                copy = torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor.detach())
                kept.append((name, copy))
                sums[name] = fingerprint(copy)
            found = checksums(sums)  # waits for all that was asked of the GPU
        except torch.OutOfMemoryError as problem:
            raise RunError(
                f"the weights of version {version} must fit a second time into the trainer's GPU (the "
                f"generator's process takes them from there), got: {problem}; free memory, or set "
                "generator.transfer=shared_memory"
            ) from problem
        self.snapshots[version] = kept
        return Manifest(
            version,
            "",
            tuple(Entry(name, x.dtype, tuple(x.shape), 0, x.nbytes, found[name]) for name, x in kept),
        )

    def release(self, manifest: Manifest) -> None:
        """Give the memory back to the allocator."""
        self.snapshots.pop(manifest.version, None)

    def close(self) -> None:
        """The same, of all versions."""
        self.forget()
        self.snapshots.clear()


class CudaIpc(GpuWeights):
    """To a process on the same GPU."""

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """The manifest with handles of the snapshot, for one reader."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for _, tensor in self.snapshots[manifest.version]]
        return replace(manifest, update={"ipc_handles": handles})

    def finish(self, manifest: Manifest) -> None:
        """Have torch note that the reader is through."""
        torch.cuda.ipc_collect()


class Nccl(GpuWeights):
    """To a process on other GPUs.

    The group's identity goes through the socket that trainer and process share: no port is open for it but
    those that NCCL itself opens, on the loopback interface where the trainer is on one host.

    Args:
        device, dtype: as for all.
        workers: ranks of vLLM, one a GPU.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, workers: int) -> None:
        super().__init__(device, dtype)
        self.workers = workers
        self.sender: Sender | None = None  # to the process that is there now

    def offer(self, manifest: Manifest, fail: Callable[[], None]) -> Manifest:
        """Begin to send the snapshot, behind those offered before; calls `fail` where that cannot be done.

        The first manifest for a process carries its group, which the process has to join.
        """
        group = None
        if self.sender is None:
            group = self.new_group()
            self.sender = Sender(self, group, fail)
            self.sender.start()
        self.sender.todo.put(self.snapshots[manifest.version])
        return replace(manifest, update={}, group=group)

    def finish(self, manifest: Manifest) -> None:
        """Wait until the snapshot is sent, which it is by all who have received it."""
        assert self.sender is not None, "it was offered"
        while True:
            try:
                return self.sender.done.get(timeout=0.1)
            except Empty:
                self.check()

    def check(self) -> None:
        """Raise RunError where the snapshot could not be sent."""
        if self.sender is not None and (error := self.sender.error) is not None:
            raise RunError(
                f"the trainer must be able to send weights by NCCL, got {type(error).__name__}: {error}; "
                "set NCCL_DEBUG=INFO to see why, or generator.transfer=shared_memory"
            ) from error

    def forget(self) -> None:
        """Give up what is being sent, and leave the group."""
        if self.sender is not None:
            self.sender.abandon()
            self.sender = None

    def new_group(self) -> dict[str, Any]:
        """What vLLM's ranks have to know to join a new group, as vLLM's engine takes it."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
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
        """Join the group as rank 0, when all others do; returns vLLM's communicator."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        torch.cuda.set_device(self.device)  # of this thread
        identity = base64.b64decode(group["nccl_unique_id_b64"])
        index = torch.cuda.current_device()
        return uid_init_process_group(identity, rank=0, world_size=group["world_size"], device=index)

    def broadcast(self, communicator: Any, weights: Weights) -> None:
        """Send a snapshot to all ranks, as vLLM's engine receives it; returns when it is sent."""
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
    """The trainer's half of all transfers to one process, first in, first out.

    A thread of its own, because a collective waits for the process, which may be busy with a request. A
    daemon: where the process died before it joined, NCCL waits for ever.
    """

    def __init__(self, store: Nccl, group: dict[str, Any], fail: Callable[[], None]) -> None:
        super().__init__(name="weights", daemon=True)
        self.store = store
        self.group = group
        self.fail = fail
        self.todo: SimpleQueue[Weights | None] = SimpleQueue()  # None: the end
        self.done: SimpleQueue[None] = SimpleQueue()  # one for each that was sent
        self.error: BaseException | None = None
        self.communicator: Any = None
        self.abandoned = False
        self.lock = threading.Lock()  # of the last two

    def run(self) -> None:
        """Send what comes."""
        try:
            communicator = self.store.join(self.group)
            with self.lock:
                self.communicator = communicator
                if self.abandoned:
                    communicator.destroy()
            while (weights := self.todo.get()) is not None and not self.abandoned:
                self.store.broadcast(communicator, weights)
                del weights  # else the last one would never be released
                self.done.put(None)
        except BaseException as error:
            self.error = error
            if not self.abandoned:
                self.fail()

    def abandon(self) -> None:
        """End: a collective that is under way is broken off."""
        self.todo.put(None)
        with self.lock:
            self.abandoned = True
            if self.communicator is not None:
                self.communicator.destroy()
