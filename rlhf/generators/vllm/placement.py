"""The GPUs that vLLM gets beside the trainer, or with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.core.errors import UserError
from rlhf.core.launched import local_rank, local_world_size

if TYPE_CHECKING:
    from rlhf.config.generator import VLLMConfig


def place(config: VLLMConfig, gpus: int) -> tuple[int, ...]:
    """Return the GPUs of the generator on a host with `gpus` GPUs; empty: vLLM uses the CPU.

    The ranks of the trainer use the first GPUs of the host. With `per_rank`, the generator of each rank has
    its own GPUs after the GPUs of the trainer, or shares the GPU of its rank. The result lists the GPUs of
    the first replica, then the GPUs of the second replica, and so on.

    Raises:
        UserError: the host has too few GPUs, or the trainer uses a GPU in `generator.devices`.
    """
    size, name = config.gpus, config.name
    if gpus == 0:
        if config.devices or (size := config.tensor_parallel_size) > 1:
            raise UserError(
                "generator.devices must be null and generator.tensor_parallel_size 1 without GPUs (torch "
                f"finds no GPU), got {config.devices or 'null'} and {size}; set generator.devices=null "
                "generator.tensor_parallel_size=1"
            )
        return ()
    trainer = 0 if config.shares_gpu else local_world_size()
    first = trainer + (local_rank() * size if config.per_rank else 0)
    devices = tuple(config.devices or range(first, first + size))
    if max(devices) >= gpus or (trainer and min(devices) < trainer):
        own = f"; set generator={name}_colocated to share the trainer's" if trainer else ""
        raise UserError(
            f"generator={name} must have {size} of the {gpus} GPUs here"
            + (f", beside the first {trainer}, which the trainer has" if trainer else "")
            + f", got {list(devices)}{own}"
        )
    return devices


def visible(devices: tuple[int, ...], visible_now: str | None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for the GPUs `devices`.

    Args:
        devices: indices into the GPUs that are visible now.
        visible_now: the present value of CUDA_VISIBLE_DEVICES; None or empty: all GPUs are visible.
    """
    names = visible_now.split(",") if visible_now else None
    return ",".join(names[i] if names else str(i) for i in devices)
