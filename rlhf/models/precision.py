"""Autocast and the dtype of matrix products."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlhf.config.model import Dtype


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Compute in `dtype` on `device`: 16 bits are autocast over weights that stay as they are."""
    if dtype is Dtype.float32:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype.value))


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which type matrix products of numbers in `dtype` are computed: that of autocast, where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
