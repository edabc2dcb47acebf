"""Autocast and the dtype of matrix products."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlhf.config.model import Dtype


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return a context in which forwards on `device` compute in `dtype`.

    With float32, the context changes nothing. A 16-bit dtype uses autocast: stored weights keep their dtype.
    Autocast keeps the 16-bit copies of weights that require a gradient until its outermost context ends.
    """
    if dtype is Dtype.float32:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype.value))


def shared_copies(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return a context in which forwards under `autocast` share one 16-bit copy of each trained weight.

    The context itself enables no autocast. The weights must not change within the context.
    """
    # Autocast deletes its copies when the number of nested contexts falls to 0, enabled or not.
    return nullcontext() if dtype is Dtype.float32 else torch.autocast(device.type, enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products of `dtype` inputs: the autocast dtype if active, else `dtype`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
