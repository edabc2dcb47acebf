"""The memory plan of a run: the memory that each device needs, estimated before anything is loaded.

A device needs some parts during the whole run (weights, optimizer states, processes) and others in phases,
one after the other (training, sampling, log-probs and scores). Its peak memory is the sum of the permanent
parts and of the largest phase. Weights, gradients and optimizer states are counted exactly. Activations are
estimated (`rlhf.memory.activations`) for sequences of the maximum length, so the real need is often smaller.
This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlhf.config.backend import Device
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import this_machine
from rlhf.memory import generator as sampling
from rlhf.memory.communication import nccl
from rlhf.memory.loaded_models import judges, models
from rlhf.memory.tokens import longest
from rlhf.memory.trainer import Trainer
from rlhf.memory.uses import (
    CONTEXT,
    LIBRARIES,
    NEARLY,
    PROCESS,
    Part,
    Phase,
    Plan,
    Use,
    kept,
    on_heap,
    times,
)

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
    return _planned(with_token_limit(cfg, machine), machine)


def plan_of_judges(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of ranks that only score texts, with the judges of `cfg`; see `plan`.

    The plan is empty if no judge is a model.
    """
    machine = machine or this_machine()
    loaded = () if cfg.stand_ins else tuple(judges(cfg))
    if not loaded or _unknown(loaded):
        return Plan((), _unknown(loaded))
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    phases = [phase for phase in trainer.phases() if phase.bytes]
    if trainer.device == "cuda":
        return Plan((_on_gpus_of_ranks(trainer, machine, (), phases),), {})
    return Plan((_without_gpus(machine, trainer.parts(), (), phases),), {})


def fills_memory(cfg: Config, machine: Machine | None = None) -> bool:
    """Return whether the memory plan limits forward passes.

    This is the case if `backend.tokens` is 0, or if it is null on a GPU, or on a CPU with too little memory
    for passes without a limit.
    """
    machine, tokens = machine or this_machine(), cfg.backend.tokens
    if tokens is None and device(cfg, machine) == "cpu":
        return not _passes_fit(cfg, machine)
    return not tokens


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
        found = cfg.with_({"backend.tokens": prompts * group * longest(cfg)})
        if prompts == 1 or _passes_fit(found, machine):
            return found
        prompts //= 2


def device(cfg: Config, machine: Machine) -> str:
    """Return the type of the device of the ranks, "cuda" or "cpu"."""
    wanted = cfg.backend.device
    return "cuda" if wanted is Device.cuda or (wanted is Device.auto and machine.gpus) else "cpu"


def _passes_fit(cfg: Config, machine: Machine) -> bool:
    """Return whether all phases except sampling need at most `NEARLY` of every device."""
    uses = _planned(cfg, machine).uses
    return all(use.total is None or use.without("sampling").bytes <= NEARLY * use.total for use in uses)


def _planned(cfg: Config, machine: Machine) -> Plan:
    loaded = () if cfg.stand_ins else tuple(models(cfg))  # stand-ins are tiny models, which fit everywhere
    if not loaded or _unknown(loaded):
        return Plan((), _unknown(loaded))
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    if trainer.device == "cuda":
        return Plan(tuple(_with_gpus(cfg, trainer, machine)), {})
    many = sampling.generators(cfg, local_world_size())
    others = [times(on_heap(part), many) for part in sampling.parts_in_ram(cfg, trainer, machine.ram)]
    parts = (*trainer.parts(), *trainer.in_ram())
    return Plan((_without_gpus(machine, parts, others, trainer.phases()),), {})


def _unknown(loaded: Iterable[Model]) -> dict[str, str]:
    return {model.key: str(model.name) for model in loaded if model.size is None}


def _without_gpus(
    machine: Machine, parts: Iterable[Part], others: Iterable[Part], phases: Iterable[Phase]
) -> Use:
    """Return the memory of a host without GPUs: parts and phases of each rank, parts of other processes."""
    local = local_world_size()
    on_host = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts)) for phase in phases
    ]
    return Use("RAM", machine.ram, kept([*(times(part, local) for part in parts), *others]), tuple(on_host))


def _on_gpus_of_ranks(
    trainer: Trainer, machine: Machine, others: Iterable[Part], phases: Iterable[Phase], groups: int = 0
) -> Use:
    """Return the memory on the GPU of each rank.

    Args:
        trainer: the memory of one rank.
        machine: the memory of this host.
        others: parts of other processes on the GPU.
        phases: the phases of an update.
        groups: number of groups of NCCL, besides that of the ranks.
    """
    local = local_world_size()
    messages = nccl(int(trainer.ranks > 1) + groups)
    parts = [Part("CUDA", CONTEXT, "one process"), *messages, *trainer.parts(), *others]
    total = min(machine.gpus[:local], default=None)
    return Use(f"GPU {_numbers(range(local))}", total, kept(parts), tuple(phases))


def _with_gpus(cfg: Config, trainer: Trainer, machine: Machine) -> Iterator[Use]:
    """Yield the memory of an inference engine, of the ranks, of processes on other GPUs, and in RAM."""
    gpus, generator, local = machine.gpus, cfg.generator, local_world_size()
    many = sampling.generators(cfg, local)
    others, phases = [], list(trainer.phases())
    if reserved := generator.reserves(on_gpu=True):
        devices = generator.reserved_gpus(local)
        if generator.shares_gpu:
            made_of = f"{reserved.share:g} of the GPU (generator.memory), freed during training"
            share = Part(reserved.engine, reserved.share * min(gpus[:local], default=0), made_of)
            phases.append(Phase("sampling", (share, *trainer.unreleased())))
            others.append(Part(f"{reserved.engine}: CUDA", CONTEXT, "its process"))
        smallest = min((gpus[i] for i in devices if i < len(gpus)), default=None)
        yield Use(
            f"{reserved.engine}'s share of GPU {_numbers(devices)}",
            None if smallest is None else int(reserved.share * smallest),
            tuple(sampling.parts_of_engine(reserved, trainer)),
        )
    workers = sampling.parts_on_gpus(cfg, trainer, len(gpus), local)
    others += sampling.shared_with_ranks(workers, local)
    if sampling.sent_on_gpu(cfg):
        others.append(sampling.weights_in_transfer(cfg, trainer))
    yield _on_gpus_of_ranks(trainer, machine, others, phases, groups=int(sampling.sent_by_nccl(cfg)))
    yield from sampling.own_gpus(workers, gpus, local)
    ram = [Part("processes", PROCESS * (local + sampling.processes(cfg) * many), LIBRARIES)]
    ram += [times(part, local) for part in trainer.in_ram()]
    if cfg.has_worker and not sampling.sent_on_gpu(cfg):
        ram.append(times(sampling.weights_in_transfer(cfg, trainer), many))
    if sampling.annotates(cfg, trainer.ranks, on_gpu=True):
        ram.append(times(Part("annotator's process", PROCESS, LIBRARIES), many))
    loads = 1 if trainer.only_first_loads else local  # hosts without rank 0 then load no models
    yield Use("RAM", machine.ram, kept(ram), (Phase("loading", (times(trainer.loading(), loads),)),))


def _numbers(gpus: Iterable[int]) -> str:
    return " ".join(map(str, gpus))
