"""Operations for which the CPU waits until a GPU has finished all of its work.

A GPU carries out operations in order, while the CPU goes on to the next. A wait ends that: until the CPU has
started new operations, the GPU has nothing to do.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlhf

PACKAGE = Path(rlhf.__file__).parent
# Operations whose result, or the size of whose result, the CPU reads.
READ = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
COPIES = ("copy_", "_to_copy")


def reason_to_wait(func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> str | None:
    """Return why the CPU waits for the GPU in a call of an operation, or None.

    A copy from the CPU that does not block is no wait: the driver copies pageable memory before it returns.
    """
    name = func.__name__.split(".")[0]
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not any(x.is_cuda for x in (*given, output) if isinstance(x, Tensor)):
        return None
    if name in READ:
        return name
    if name in INDEXING:
        masks = [
            x for x in tree_leaves(args[1]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
        ]
        return f"{name} by a mask" if masks else None
    if name in COPIES:
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], output)
        free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if source.is_cuda == target.is_cuda or (free and target.is_cuda):
            return None
        return "copy to the GPU" if target.is_cuda else "copy to the CPU"
    return None


class Waits(TorchDispatchMode):
    """Counts the waits of a block of code, by their reason and the file of the project that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if reason := reason_to_wait(func, args, kwargs or {}, output):
            files = [Path(frame.filename) for frame in extract_stack()]
            mine = [file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE)]
            self.counts[f"{reason} in {mine[-1] if mine else 'a backward pass'}"] += 1
        return output
