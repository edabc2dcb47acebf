"""Stage 5: weights by NCCL.

With two GPUs, vLLM and then a server on the second GPU load weights from the first by NCCL. With fewer GPUs,
the same sender and vLLM's packing run between two processes, and a pipe replaces the broadcast of NCCL.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rlhf.generators import weights as gpu_transfer
from rlhf.generators.weights import Nccl, checksums, fingerprint
from tests.gpu.report import Report, Skip
from tests.gpu.samplers import need_vllm
from tests.gpu.shapes import HEADS, tiny

BUFFER = 100_000  # bytes; the weights need several buffers
FILES = "tests/end_to_end"
TESTS = (
    f"{FILES}/test_vllm.py::test_on_gpus_tokens_are_those_of_the_trainer_after_each_load[nccl]",
    f"{FILES}/test_vllm_server.py::test_on_gpus_weights_come_by_nccl",
)
LIMIT_S = 60.0  # for the answer of the other process


def run(report: Report) -> None:
    """Run the stage."""
    with report.part("NCCL between two GPUs"):
        need_vllm(report)
        report.need_gpu()
        if torch.cuda.device_count() < 2:
            raise Skip("needs two GPUs")
        if importlib.util.find_spec("pytest") is None:
            raise Skip("needs pytest")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, stderr=subprocess.STDOUT)
        report.equal("vLLM and a server load versions by NCCL, exit code of pytest", done.returncode, 0)
    with report.part("packing between two processes"):
        need_vllm(report)
        check_packing(report)


class Pipe:
    """A replacement for the communicator of NCCL: it sends and receives buffers through a connection."""

    def __init__(self, connection: Connection, sends: bool) -> None:
        self.connection = connection
        self.sends = sends

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a buffer, or receive into it."""
        if self.sends:
            self.connection.send_bytes(tensor.cpu().numpy().tobytes())
        else:
            data = bytearray(self.connection.recv_bytes())
            tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def destroy(self) -> None:
        """Close the connection."""
        self.connection.close()


class Piped(Nccl):
    """The store for NCCL, whose sender uses a pipe."""

    def __init__(self, device: torch.device, connection: Connection) -> None:
        super().__init__(device, torch.float32, workers=1)
        self.connection = connection

    def new_group(self) -> dict[str, Any]:
        """Return no data: the pipe exists."""
        return {}

    def join(self, group: dict[str, Any]) -> Pipe:
        """Return the sending end of the pipe."""
        return Pipe(self.connection, sends=True)


def without_streams(device: torch.device) -> ExitStack:
    """Return a context in which vLLM's packing runs on a CPU, which has no streams."""
    patches, packing = ExitStack(), "vllm.distributed.weight_transfer.packed_tensor"
    if device.type == "cpu":
        stream = SimpleNamespace(synchronize=lambda: None)
        patches.enter_context(patch(f"{packing}._get_streams", lambda index, count: (stream,) * count))
        patches.enter_context(patch("torch.accelerator.current_device_index", lambda: 0))
    return patches


def receive(connection: Connection, answers: Connection, metadata: list[Any], device: torch.device) -> None:
    """Receive the tensors of one version with vLLM's consumer, and send their fingerprints back."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    if device.type == "cuda":
        torch.cuda.set_device(device)
    sums = {}

    def take(tensors: list[tuple[str, torch.Tensor]]) -> None:
        sums.update({name: fingerprint(tensor) for name, tensor in tensors})

    with without_streams(device):
        packed_nccl_broadcast_consumer(
            iterator=iter(metadata),
            group=Pipe(connection, sends=False),
            src=0,
            post_unpack_func=take,
            buffer_size_bytes=BUFFER,
            num_buffers=2,
            device=device,
        )
    answers.send(checksums(sums))


def check_packing(report: Report) -> None:
    """Send the weights of a model to another process, and compare their fingerprints."""
    device, context = report.device, get_context("spawn")
    model = tiny("llama", **HEADS).to(device)
    receiving, sending = context.Pipe(duplex=False)
    answers, answering = context.Pipe(duplex=False)
    store = Piped(device, sending)
    failures: list[str] = []
    with without_streams(device), patch.object(gpu_transfer, "BUFFER", BUFFER):
        written = store.write(model.state_dict().items(), 1)
        metadata = [(entry.name, (list(entry.shape), entry.dtype)) for entry in written.entries]
        process = context.Process(target=receive, args=(receiving, answering, metadata, device), daemon=True)
        process.start()
        store.offer(written, fail=lambda: failures.append("the sender failed"))
        if not answers.poll(LIMIT_S):
            raise TimeoutError(f"no answer of the other process within {LIMIT_S:g} s {failures}")
        found = answers.recv()
        store.finish(written)
        process.join(LIMIT_S)
    store.close()
    report.equal("fingerprints after packing", found == written.checksums(), True)
    report.figure("tensors", len(found))
