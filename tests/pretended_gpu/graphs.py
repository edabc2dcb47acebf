"""CUDA graphs of the pretended GPU: a recording keeps the operations, a replay carries them out again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_gpu.waits import reason_to_wait

recorded: list[Graph] = []  # the graph that is recorded now


def recording() -> bool:
    """Return whether operations are recorded."""
    return bool(recorded)


class Recorder(TorchDispatchMode):
    """Keeps the operations that are carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if reason := reason_to_wait(func, args, kwargs or {}, output):
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.calls.append((func, args, kwargs or {}, output))
        return output


class Graph:
    """In place of `torch.cuda.CUDAGraph`: as there, a replay reads and writes the memory of the recording.

    An operation that waits for the GPU ends a recording by a RuntimeError.
    """

    def capture_begin(self, **options: Any) -> None:
        """Begin to record."""
        self.recorder = Recorder()
        self.recorder.__enter__()
        recorded.append(self)

    def capture_end(self) -> None:
        """End the recording."""
        recorded.remove(self)
        self.recorder.__exit__(None, None, None)

    def replay(self) -> None:
        """Carry out the recorded operations, and put their results into the tensors of the recording."""
        for func, args, kwargs, output in self.recorder.calls:
            for old, new in zip(tree_leaves(output), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
