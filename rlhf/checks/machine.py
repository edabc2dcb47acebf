"""Check of processes, GPUs, memory and downloaded models of this machine. This module imports no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.checks.check import warn
from rlhf.checks.publishing import push_problems
from rlhf.config.backend import Device
from rlhf.config.generator import Transfer, VLLMColocatedConfig, VLLMConfig
from rlhf.core import hub
from rlhf.core.errors import UserError
from rlhf.core.launched import local_world_size, missing_variables, world_size
from rlhf.core.machine import this_machine, torch_has_cuda
from rlhf.memory import advice
from rlhf.memory.loaded_models import models
from rlhf.models.folders import is_local, offline_problem

if TYPE_CHECKING:
    from rlhf.config.root import Config


def check_machine(cfg: Config) -> None:
    """Check whether this machine has the processes, the GPUs, the models and the memory of the run `cfg`.

    Call this function in the process of the job, because a sweep may start jobs on other machines.

    Raises:
        UserError: the machine lacks processes, GPUs, memory, a model that it cannot download, or the token
            for `push_to`.
    """
    if found := [
        *problems(cfg),
        *expandable_segments(cfg),
        *downloads(cfg),
        *push_problems(cfg.push_to),
    ]:
        raise UserError(*found)
    check_memory(cfg)


def check_memory(cfg: Config) -> None:
    """Check the memory of this machine for a run, and warn of devices that may have too little memory.

    Call this function in the process of the job, because a sweep may start jobs on other machines.

    Raises:
        UserError: a device certainly has too little memory.
    """
    if found := advice.problems(cfg):
        raise UserError(*found)
    warn(advice.warnings(cfg))


def problems(cfg: Config) -> Iterator[str]:
    """Yield an error for missing GPUs, and for processes that no launcher or another number started."""
    wanted, started = cfg.backend.ranks, world_size()
    if missing := missing_variables():
        yield (
            f"WORLD_SIZE must be 1 or not set without a launcher (the ranks need {', '.join(missing)} to "
            f"connect), got {started}; start it with torchrun --nproc-per-node {started} -m rlhf.train, or "
            "run: unset WORLD_SIZE RANK LOCAL_RANK"
        )
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
            "backend.device must be cpu or auto with a torch that was built without CUDA, got cuda; install "
            "torch with CUDA (make setup LOCK=gpu), or try the run with debug=tiny"
        )
        return
    found = len(this_machine().gpus)
    trainer, generator = local_world_size() if started > 1 else wanted or 1, gpus_of_generator(cfg)
    if 0 < found < trainer + generator:  # 0: the number of GPUs is unknown
        yield (
            f"the run must have {trainer + generator} GPUs here ({trainer} to train, {generator} to sample), "
            f"got {found}; use a machine with enough GPUs, or choose another hardware= option (see --help)"
        )


def expandable_segments(cfg: Config) -> Iterator[str]:
    """Yield an error if torch allocates memory that cannot be sent to vLLM by CUDA IPC."""
    generator = cfg.generator
    if not isinstance(generator, VLLMColocatedConfig) or generator.tensor_parallel_size > 1:
        return
    if generator.transfer not in (Transfer.auto, Transfer.ipc):
        return
    if cfg.backend.device is Device.cpu or not this_machine().gpus:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        options = [option.strip() for option in value.split(",")]
        others = [each for each in options if each.replace(" ", "").lower() != "expandable_segments:true"]
        if len(others) < len(options):
            command = f"export {name}={shlex.quote(','.join(others))}" if others else f"unset {name}"
            yield (
                f"{name} must not contain expandable_segments:True with generator={generator.name} and "
                f"generator.transfer={generator.transfer.value} (another process may not map such memory by "
                f"CUDA IPC), got {value}; run: {command}, or set generator.transfer=shared_memory"
            )


def downloads(cfg: Config) -> Iterator[str]:
    """Yield an error for each model that the run must download, if the hub cannot be reached from here."""
    if cfg.stand_ins:
        return
    loaded = {model.key: model.name for model in models(cfg)} | {"model.tokenizer": cfg.model.tokenizer}
    absent = {
        key: name
        for key, name in loaded.items()
        if name is not None and not is_local(name) and hub.cached_folder(name) is None
    }
    if absent and (reason := hub.unreachable()) is not None:
        for key, name in absent.items():
            yield offline_problem(key, name, reason)


def gpus_of_generator(cfg: Config) -> int:
    """Return the number of GPUs that the generators of this host do not share with the trainer."""
    generator = cfg.generator
    if not isinstance(generator, VLLMConfig) or generator.shares_gpu:
        return 0
    return generator.gpus * (local_world_size() if generator.per_rank else 1)
