"""What takes the place of NCCL where there is no GPU: a socket between the trainer and one worker of vLLM.

Streams and communicator are replaced; groups, packing and loading are those of vLLM. vLLM imports this module
in the worker of a server (`worker_extension_cls`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rlhf.generators import weights
from tests.generators.test_gpu_transfer import Peer

ENGINES = "vllm.distributed.weight_transfer"
IDENTITY = 128  # bytes of the identity of a group, of which the first two are a port
STREAM = SimpleNamespace(synchronize=lambda: None)


class Communicator:
    """Two ranks of a group.

    Args:
        connection: between the ranks.
        sends: whether this rank is the trainer.
    """

    def __init__(self, connection: socket.socket, sends: bool) -> None:
        self.peer, self.sends = Peer(connection), sends

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send or receive a tensor."""
        flat = tensor.view(-1).view(torch.uint8)
        if self.sends:
            self.peer.send(flat.numpy().tobytes())
        else:
            flat.copy_(torch.frombuffer(bytearray(self.peer.receive(flat.numel())), dtype=torch.uint8))

    def destroy(self) -> None:
        """Break the connection."""
        self.peer.destroy()


def joined(info: Any, parallel: Any) -> Communicator:
    """Join a group as a worker."""
    port = int.from_bytes(info.nccl_unique_id_bytes[:2], "big")
    return Communicator(socket.create_connection(("127.0.0.1", port)), sends=False)


class Nccl(weights.Nccl):
    """The store of the trainer."""

    def new_group(self) -> dict[str, Any]:
        """Return the data of a new group, whose identity is a port."""
        self.server = socket.create_server(("127.0.0.1", 0))
        identity = self.server.getsockname()[1].to_bytes(2, "big") + bytes(IDENTITY - 2)
        library = SimpleNamespace(ncclGetUniqueId=lambda: identity)
        with patch("vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary", lambda: library):
            return super().new_group()

    def join(self, group: dict[str, Any]) -> Communicator:
        """Join a group as the trainer."""
        with self.server as server:
            return Communicator(server.accept()[0], sends=True)


@contextmanager
def in_place() -> Iterator[None]:
    """Replace what needs a GPU."""
    with ExitStack() as patches:
        for target, instead in (
            (f"{ENGINES}.nccl_engine.worker_init_process_group", joined),
            (f"{ENGINES}.packed_tensor._get_streams", lambda device, number: (STREAM,) * number),
            ("torch.accelerator.current_device_index", lambda: 0),
        ):
            patches.enter_context(patch(target, instead))
        yield


def __getattr__(name: str) -> Any:
    """Return the extension of the workers of a server; only vLLM's workers ask for it."""
    if name != "Extension":
        raise AttributeError(name)
    from rlhf.generators.vllm.worker_extension import WorkerExtension

    _FOREVER.enter_context(in_place())
    return WorkerExtension


_FOREVER = ExitStack()
