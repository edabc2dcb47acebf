"""Setting of a process that computes the same bits as those on other x86 processors (`backend.portable`)."""

from __future__ import annotations

import os

import torch

from rlhf.core.errors import UserError
from rlhf.core.portable import PORTABLE, asked_portable


def set_portable(wanted: bool) -> None:
    """Let this process and its child processes compute the bits of every processor, or of their own.

    Call this function before torch computes in this process.

    Raises:
        UserError: this is not possible here.
    """
    if asked_portable() and not wanted:
        raise UserError(
            "backend.portable must be true in this process (an earlier run or the environment made it so), "
            f"got false; start another process, without the variables {', '.join(PORTABLE)}"
        )
    if wanted:
        os.environ.update(PORTABLE)
        if not _computes_portably():
            for name in PORTABLE:
                del os.environ[name]
            raise UserError(
                "backend.portable=true needs an x86 processor with AVX2, torch with MKL, and a process in "
                "which torch has not computed before; start another process, or set backend.portable=false"
            )


def _computes_portably() -> bool:
    """Return whether torch uses AVX2, and MKL its compatible branch.

    This branch rounds each product before it is added. With AVX2, the other branches do not: they fuse both.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.mkl.is_available():
        return False
    a = 1 + 2.0**-12
    left, right = a * torch.eye(64), a * torch.eye(64)
    left[:, 0], right[0] = -1 - 2.0**-11, 1
    return not (left @ right).diagonal()[1:].any().item()  # a * a - (1 + 2^-11): 0 if rounded, 2^-24 if fused
