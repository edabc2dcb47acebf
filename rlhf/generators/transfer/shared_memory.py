"""Policy weights in shared memory: the transfer between processes of one machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
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
)


class SharedWeights(WeightStore):
    """Files in shared memory, each with the weights of one version.

    A file is written again once its version has been released by all that hold it, so there are as many as
    versions in use.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of the next
        self.holders: dict[str, int] = {}  # how many hold a file, by path
        self.files: dict[str, BinaryIO] = {}  # by path
        self.free: deque[str] = deque()  # paths; `release` may be called from another thread
        self.folder: str | None = None  # of files that have names

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
        """Copy `weights`, one tensor at a time, into a file that is free; each before the next is asked for.

        Raises:
            RunError: there is not enough shared memory.
        """
        path = self.free.pop() if self.free else self.create()
        file = self.files[path]
        entries = []
        try:
            file.seek(0)
            file.write(HEADER.pack(NOTHING))
            file.flush()
            for name, tensor in weights:
                data = raw(tensor)
                offset = file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
                file.write(data)
                entries.append(
                    Entry(name, tensor.dtype, tuple(tensor.shape), offset, data.nbytes, digest(data))
                )
            file.truncate()
            file.seek(0)
            file.write(HEADER.pack(version))
            file.flush()
        except OSError as problem:
            raise RunError(
                f"the weights of version {version} must fit into shared memory (the generator's process takes"
                f" them from there), got: {problem}; free memory, or set generator.worker=false"
            ) from problem
        self.holders[path] = 1
        return Manifest(version, path, tuple(entries))

    def hold(self, manifest: Manifest) -> None:
        """One more needs this version, and will release it."""
        with self.lock:
            self.holders[manifest.path] += 1

    def create(self) -> str:
        """One more file; returns the path at which any process of this user opens it."""
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
        """One that held this version needs it no more."""
        with self.lock:
            self.holders[manifest.path] -= 1
            if not self.holders[manifest.path]:
                self.free.append(manifest.path)

    def close(self) -> None:
        """Give the memory back."""
        for file in self.files.values():
            file.close()
        for path in self.files:
            remove(path)
        self.files, self.free = {}, deque()


def remove(path: str) -> None:
    """Remove the shared files of the trainer that `path` is of; those without names go with their trainer."""
    if not path.startswith("/proc/"):
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def read(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as they were written: views of the file, on the CPU, to be copied at once.

    Raises:
        TransferError: the file is cut short, holds another version, or a tensor differs from what was sent.
    """
    version = manifest.version
    try:
        with open(manifest.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
    except OSError as problem:
        raise TransferError(f"the weights of version {version} cannot be read: {problem}") from problem
    held = HEADER.unpack(head)[0] if len(head) == HEADER.size else NOTHING
    for entry in manifest.entries:
        if entry.offset + entry.bytes > size:
            raise TransferError(
                f"{entry.name} of version {version} must reach to byte {entry.offset + entry.bytes} of the "
                f"shared file, got a file of {size} bytes: the transfer was cut short"
            )
    if held != version:
        raise TransferError(
            f"the shared file must hold version {version}, got "
            + ("a version that is not written to its end" if held == NOTHING else f"version {held}")
        )
    memory = torch.from_file(manifest.path, shared=False, size=size, dtype=torch.uint8)
    for entry in manifest.entries:
        data = memory[entry.offset : entry.offset + entry.bytes]
        if (found := digest(data.numpy().data)) != entry.checksum:
            raise TransferError(
                f"{entry.name} of version {version} must have the checksum {entry.checksum:016x} in the "
                f"shared file, got {found:016x}: it is not what the trainer wrote"
            )
        yield entry.name, data.view(entry.dtype).view(entry.shape)
