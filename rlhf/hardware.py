"""Whether a run can start on this machine: its processes and its GPUs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config import Config
from rlhf.engines.config import Device
from rlhf.folder import rank_count
from rlhf.generators.config import VLLMConfig, local_ranks
from rlhf.memory.machine import this_machine, torch_has_cuda


def problems(cfg: Config) -> Iterator[str]:
    """Yield what keeps the run `cfg` from starting here: missing GPUs, or processes it is not meant for."""
    wanted, started = cfg.backend.ranks, rank_count()
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
    trainer, generator = local_ranks() if started > 1 else wanted or 1, gpus_of_generator(cfg)
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
    return generator.gpus * (local_ranks() if generator.per_rank else 1)
