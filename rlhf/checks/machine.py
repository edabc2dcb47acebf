"""Whether a run can start on this machine: its processes and its GPUs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.checks.check import warn
from rlhf.config.backend import Device
from rlhf.config.generator import VLLMConfig
from rlhf.core.errors import UserError
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import this_machine, torch_has_cuda
from rlhf.memory import advice

if TYPE_CHECKING:
    from rlhf.config.root import Config


def check_machine(cfg: Config) -> None:
    """Look whether this machine has the processes, the GPUs and the memory for the run.

    Raises:
        UserError: it has not.
    """
    if found := list(problems(cfg)):
        raise UserError(*found)
    check_memory(cfg)


def check_memory(cfg: Config) -> None:
    """Look whether this machine has the memory for the run; a sweep's jobs may run on another than we do.

    Raises:
        UserError: a device has clearly too little.
    """
    if found := advice.problems(cfg):
        raise UserError(*found)
    warn(advice.warnings(cfg))


def problems(cfg: Config) -> Iterator[str]:
    """Yield what keeps the run `cfg` from starting here: missing GPUs, or processes it is not meant for."""
    wanted, started = cfg.backend.ranks, world_size()
    if wanted is not None and wanted != started:
        command = "python" if wanted == 1 else f"torchrun --nproc-per-node {wanted}"
        yield (
            f"backend.ranks must be the number of processes that train together, got {wanted} with {started} "
            f"started; start it with {command} -m rlhf.train, or set backend.ranks={started}"
        )
    if cfg.backend.device is not Device.cuda:
        return
    if not torch_has_cuda():
        yield (
            "backend.device must be cpu or auto where torch was not built for GPUs, got cuda; install it for "
            "GPUs (make setup LOCK=gpu), or try the run with debug=tiny"
        )
        return
    found = len(this_machine().gpus)
    trainer, generator = local_world_size() if started > 1 else wanted or 1, gpus_of_generator(cfg)
    if 0 < found < trainer + generator:  # none found: not known
        yield (
            f"the run must have {trainer + generator} GPUs here ({trainer} to train, {generator} to sample), "
            f"got {found}; start it where there are as many, or choose other hardware (--help lists it)"
        )


def gpus_of_generator(cfg: Config) -> int:
    """How many GPUs the generators of this host have for themselves."""
    generator = cfg.generator
    if not isinstance(generator, VLLMConfig) or generator.shares_gpu:
        return 0
    return generator.gpus * (local_world_size() if generator.per_rank else 1)
