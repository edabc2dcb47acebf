"""What `backend.portable` needs: the same bits on every x86 processor with AVX2."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Variables that libraries read when they first compute. By default torch takes the widest instructions of the
# processor, and MKL (its matrix products) kernels for its model, so that sums are made in another order.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",  # the only branch that MKL takes on processors of every maker
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def asked_portable() -> bool:
    """Return whether this process has the variables."""
    return PORTABLE.items() <= os.environ.items()


def root(scalar: Tensor) -> Tensor:
    """Return the square root of a scalar.

    `torch.sqrt` in MKL's compatible branch begins with an instruction that approximates, and whose last bits
    are the choice of a processor's maker.
    """
    return scalar.new_tensor(math.sqrt(scalar.item())) if asked_portable() else scalar.sqrt()
