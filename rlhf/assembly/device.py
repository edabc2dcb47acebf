"""Choice of the device of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf.assembly.portable import set_portable
from rlhf.config.backend import Device
from rlhf.config.model import Dtype, float16_needs_gpu
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from rlhf.config.root import Config


def build_device(cfg: Config) -> torch.device:
    """Return the device of the models, without an index, and let this process compute as `cfg.backend` asks.

    Raises:
        UserError: the config asks for a GPU and torch finds none, for float16 without a GPU, or for
            `backend.portable` where this is not possible.
    """
    set_portable(cfg.backend.portable)
    name = cfg.backend.device.value
    if cfg.backend.device is Device.auto:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "backend.device=cuda needs a GPU that torch can use, and torch finds none; "
            "set backend.device=auto"
        )
    if name == "cpu" and cfg.model.dtype is Dtype.float16:
        raise UserError(float16_needs_gpu("torch finds none"))
    return torch.device(name)
