"""Random seeds, and arithmetic that gives the same bits on every x86 processor."""

from __future__ import annotations

import hashlib
import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


# Reproducible random seeds, derived from the run's seed and the purpose of each draw.


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    Different purposes give unrelated seeds. The same purpose gives the same seed in every process and on
    every rank.

    Args:
        seed: the seed of the run.
        purpose: names and counters that identify the draw, for example "minibatches", update, epoch.
    """
    text = ":".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# What `backend.portable` needs: the same bits on every x86 processor with AVX2.


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
