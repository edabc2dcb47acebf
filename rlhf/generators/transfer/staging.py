"""Copies of tensors from a GPU to the host, each of which stays unchanged while the next one is made."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor


class Staging:
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


def in_host_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is in the memory of the host."""
    return tensor.device.type == "cpu"
