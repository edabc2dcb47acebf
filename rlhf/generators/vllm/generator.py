"""Build a vLLM generator: devices, weight transfer, worker processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from rlhf.config.generator import Transfer
from rlhf.core.errors import UserError
from rlhf.core.launched import local_ranks
from rlhf.generators.transfer.gpu import CudaIpc, Nccl
from rlhf.generators.transfer.shared_memory import SharedWeights

if TYPE_CHECKING:
    from rlhf.config.generator import VLLMConfig
    from rlhf.generators.transfer.weights import WeightStore


def place(config: VLLMConfig, gpus: int) -> tuple[int, ...]:
    """The GPUs of the generator, on a host with `gpus`, whose first ones the ranks have; none: the CPU.

    With `per_rank` each rank's generator has GPUs of its own behind these, or shares the rank's; those of
    replicas follow one another.

    Raises:
        UserError: there are not as many as that, or the trainer has one of them.
    """
    size, name = config.gpus, config.name
    if gpus == 0:
        if config.devices or (size := config.tensor_parallel_size) > 1:
            raise UserError(
                "generator.devices must be null and generator.tensor_parallel_size 1 without GPUs (torch "
                f"finds none), got {config.devices or 'null'} and {size}; set generator.devices=null "
                "generator.tensor_parallel_size=1"
            )
        return ()
    trainer = 0 if config.shares_gpu else local_ranks()
    first = trainer + (int(os.environ.get("LOCAL_RANK", "0")) * size if config.per_rank else 0)
    devices = tuple(config.devices or range(first, first + size))
    if max(devices) >= gpus or (trainer and min(devices) < trainer):
        own = f"; set generator={name}_colocated to share the trainer's" if trainer else ""
        raise UserError(
            f"generator={name} must have {size} of the {gpus} GPUs here"
            + (f", beside the first {trainer}, which the trainer has" if trainer else "")
            + f", got {list(devices)}{own}"
        )
    return devices


def route(config: VLLMConfig, devices: tuple[int, ...], trainer: torch.device, nccl: bool) -> Transfer:
    """How weights go from the trainer's device to vLLM's GPUs `devices` (none: the CPU).

    Args:
        config: of the generator.
        devices: as `place` gives them.
        trainer: the device of the policy that is trained.
        nccl: whether torch has NCCL.

    Raises:
        UserError: they cannot go as generator.transfer says.
    """
    asked, gpus = config.transfer, bool(devices) and trainer.type == "cuda"
    if asked is Transfer.auto:
        if gpus and config.shares_gpu and len(devices) == 1:
            return Transfer.ipc
        alone = config.replicas == 1  # else all take one snapshot over
        return Transfer.nccl if gpus and alone and not config.shares_gpu and nccl else Transfer.shared_memory
    if asked is not Transfer.shared_memory and not gpus:
        raise UserError(
            "generator.transfer must be auto or shared_memory where trainer and vLLM are not both on GPUs "
            f"(the trainer is on {trainer.type}, vLLM on {'cuda' if devices else 'cpu'}), got {asked.value}; "
            "set generator.transfer=auto"
        )
    if asked is Transfer.nccl and not nccl:
        raise UserError(
            "generator.transfer must not be nccl where torch is built without NCCL, got nccl; "
            "set generator.transfer=auto"
        )
    return asked


def build_store(transfer: Transfer, trainer: torch.device, dtype: torch.dtype, workers: int) -> WeightStore:
    """The trainer's side of a transfer to vLLM, which computes in `dtype` on so many GPUs."""
    if transfer is Transfer.ipc:
        return CudaIpc(trainer, dtype)
    return Nccl(trainer, dtype, workers) if transfer is Transfer.nccl else SharedWeights()


def visible(devices: tuple[int, ...], visible_now: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for the GPUs `devices`, counted among those that are visible now."""
    names = visible_now.split(",") if visible_now else None
    return ",".join(names[i] if names else str(i) for i in devices)
