"""The memory plan of a run: the memory that each device needs, estimated before anything is loaded.

A device needs some parts during the whole run (weights, optimizer states, processes) and others in phases,
one after the other (training, sampling, log-probs and scores). Its peak memory is the sum of the permanent
parts and of the largest phase. Weights, gradients and optimizer states are counted exactly. Activations are
estimated (`rlhf.memory.activations`) for sequences of the maximum length, so the real need is often smaller.
This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.backend import Device
from rlhf.config.generator import VLLMConfig
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import this_machine
from rlhf.memory.communication import nccl, sends_by_nccl
from rlhf.memory.generator import (
    annotates,
    generator_parts,
    generators,
    on_gpu_store,
    replicas,
    shared_weights,
    vllm_on_gpu,
)
from rlhf.memory.loaded_models import models
from rlhf.memory.tokens import longest
from rlhf.memory.trainer import Trainer
from rlhf.memory.uses import CONTEXT, NEARLY, PROCESS, Part, Phase, Plan, Use, kept, on_heap, times
from rlhf.memory.workers import own_gpus, shared_with_ranks, worker_parts

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.machine import Machine
    from rlhf.memory.loaded_models import Model


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of the run `cfg` on `machine`, by default this machine.

    The plan is empty for tiny stand-ins. If the size of a model is unknown, the plan lists only unknown
    models.
    """
    machine = machine or this_machine()
    return planned(with_token_limit(cfg, machine), machine)


def planned(cfg: Config, machine: Machine) -> Plan:
    """Return the memory plan of a run whose `backend.tokens` is the limit of its forward passes."""
    if cfg.stand_ins:  # tiny models, which fit everywhere
        return Plan((), {})
    loaded = tuple(models(cfg))
    if names := unknown(loaded):
        return Plan((), names)
    local = local_world_size()
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    if trainer.device == "cuda":
        return Plan(tuple(on_gpus(cfg, trainer, machine, local)), {})
    parts = [times(part, local) for part in (*trainer.parts(), *trainer.in_ram())]
    many = generators(cfg, local)
    parts += [times(on_heap(part), many) for part in generator_parts(cfg, trainer, machine.ram)]
    phases = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts))
        for phase in trainer.phases()
    ]
    return Plan((Use("RAM", machine.ram, kept(parts), tuple(phases)),), {})


def fills_memory(cfg: Config, machine: Machine | None = None) -> bool:
    """Return whether the memory plan limits forward passes.

    This is the case if `backend.tokens` is 0, or if it is null on a GPU, or on a CPU with too little memory
    for passes without a limit.
    """
    machine, tokens = machine or this_machine(), cfg.backend.tokens
    if tokens is None and device(cfg, machine) == "cpu":
        return not passes_fit(cfg, machine)
    return not tokens


def passes_fit(cfg: Config, machine: Machine) -> bool:
    """Return whether all phases except sampling need at most `NEARLY` of every device."""
    uses = planned(cfg, machine).uses
    return all(use.total is None or use.without("sampling").bytes <= NEARLY * use.total for use in uses)


def with_token_limit(cfg: Config, machine: Machine | None = None) -> Config:
    """Return `cfg`, with `backend.tokens` set to the limit that fits into the memory if `fills_memory`.

    The limit is that of `backend.micro_batch` sequences of the maximum length, halved until forward passes
    are estimated to need at most `NEARLY` of every device, or until it is that of the samples of one prompt.
    """
    machine = machine or this_machine()
    if not fills_memory(cfg, machine):
        return cfg
    group = cfg.algo.samples_per_prompt
    prompts = max(1, cfg.backend.micro_batch // group)
    while True:
        found = replace(cfg, backend=replace(cfg.backend, tokens=prompts * group * longest(cfg)))
        if prompts == 1 or passes_fit(found, machine):
            return found
        prompts //= 2


def unknown(loaded: Iterable[Model]) -> dict[str, str]:
    """Return the models whose size is unknown, by config key."""
    return {model.key: str(model.name) for model in loaded if model.size is None}


def device(cfg: Config, machine: Machine) -> str:
    """Return the type of the device of the ranks, "cuda" or "cpu"."""
    wanted = cfg.backend.device
    return "cuda" if wanted is Device.cuda or (wanted is Device.auto and machine.gpus) else "cpu"


def on_device(cfg: Config, loaded: tuple[Model, ...], machine: Machine | None = None) -> Use:
    """Return the memory that frozen models need on the device of the ranks, to score texts.

    Args:
        cfg: the config.
        loaded: the models; their sizes are known.
        machine: the machine, by default this machine.
    """
    machine = machine or this_machine()
    local, where = local_world_size(), device(cfg, machine)
    trainer = Trainer(cfg, loaded, world_size(), where)
    phases = [phase for phase in trainer.phases() if phase.bytes]
    if where == "cuda":
        parts = [Part("CUDA", CONTEXT, "one process"), *nccl(int(trainer.ranks > 1)), *trainer.parts()]
        names = " ".join(map(str, range(local)))
        return Use(f"GPU {names}", min(machine.gpus[:local], default=None), kept(parts), tuple(phases))
    parts = [times(part, local) for part in trainer.parts()]
    phases = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts)) for phase in phases
    ]
    return Use("RAM", machine.ram, kept(parts), tuple(phases))


def on_gpus(cfg: Config, trainer: Trainer, machine: Machine, local: int) -> Iterator[Use]:
    """Yield the memory needed on the GPUs of vLLM, on the GPUs of the trainer's ranks, and in RAM.

    Args:
        cfg: the config of the run.
        trainer: the memory of one rank.
        machine: the memory of this host.
        local: the number of ranks on this host.
    """
    gpus, generator, many = machine.gpus, cfg.generator, generators(cfg, local)
    total = min(gpus[:local], default=None)
    groups = int(trainer.ranks > 1) + sends_by_nccl(generator)
    parts = [Part("CUDA", CONTEXT, "one process"), *nccl(groups), *trainer.parts()]
    phases = list(trainer.phases())
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.on_gpu
        devices = tuple(generator.reserved_gpus(local))
        if generator.shares_gpu:
            made_of = f"{share:g} of the GPU (generator.memory), freed during training"
            vllm = Part("vLLM", share * (total or 0), made_of)
            phases.append(Phase("sampling", (vllm, *trainer.unreleased())))
            parts.append(Part("vLLM: CUDA", CONTEXT, "its process"))
        smallest = min((gpus[i] for i in devices if i < len(gpus)), default=None)
        yield Use(
            f"vLLM's share of GPU {' '.join(map(str, devices))}",
            None if smallest is None else int(share * smallest),
            tuple(vllm_on_gpu(generator, trainer)),
        )
    workers = worker_parts(cfg, trainer, len(gpus), local)
    parts += shared_with_ranks(workers, local)
    if on_gpu_store(generator):
        parts.append(shared_weights(cfg, trainer))
    names = " ".join(map(str, range(local)))
    yield Use(f"GPU {names}", total, kept(parts), tuple(phases))
    yield from own_gpus(workers, gpus, local)
    ram = [Part("processes", PROCESS * (local + replicas(cfg) * many), "Python, torch, libraries")]
    ram += [times(part, local) for part in trainer.in_ram()]
    if cfg.has_worker and not on_gpu_store(generator):
        ram.append(times(shared_weights(cfg, trainer), many))
    if annotates(cfg, trainer.ranks, on_gpu=True):
        ram.append(times(Part("annotator's process", PROCESS, "Python, torch, libraries"), many))
    loads = 1 if trainer.only_first_loads else local  # hosts without rank 0 then load no models
    yield Use("RAM", machine.ram, kept(ram), (Phase("loading", (times(trainer.loading(), loads),)),))
