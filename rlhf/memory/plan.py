"""The memory plan of a run: what each device will need, estimated before anything is loaded, without torch.

A device holds some parts all the time (weights, optimizer states, a generator's process) and others in turn
(training, sampling, log-probs and scores); what it needs is the first and the largest of the second. Weights,
gradients and optimizer states are counted; activations are estimated (`rlhf.memory.activations`), for
sequences as long as the config allows, so that they may well be less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config.backend import Device
from rlhf.config.generator import VLLMConfig, WorkerConfig
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import this_machine
from rlhf.memory.generator import (
    generator_parts,
    generators,
    hf_process,
    on_gpu_store,
    replicas,
    shared_weights,
    vllm_on_gpu,
    vllm_weights,
)
from rlhf.memory.loaded_models import models
from rlhf.memory.trainer import Trainer
from rlhf.memory.uses import CONTEXT, PROCESS, Part, Phase, Plan, Use, kept, on_heap, times

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.machine import Machine


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """What the run `cfg` needs on `machine`, by default this one."""
    if cfg.stand_ins:  # so small that nothing is to be planned
        return Plan((), {})
    machine = machine or this_machine()
    loaded = list(models(cfg))
    unknown = {model.key: str(model.name) for model in loaded if model.size is None}
    if unknown:
        return Plan((), unknown)
    wanted = cfg.backend.device
    on_gpu = wanted is Device.cuda or (wanted is Device.auto and bool(machine.gpus))
    ranks, local = world_size(), local_world_size()
    trainer = Trainer(cfg, tuple(loaded), ranks, "cuda" if on_gpu else "cpu")
    if on_gpu:
        return Plan(tuple(on_gpus(cfg, trainer, machine, local)), {})
    parts = [times(part, local) for part in (*trainer.parts(), *trainer.in_ram())]
    many = generators(cfg, local)
    parts += [times(on_heap(part), many) for part in generator_parts(cfg, trainer, machine.ram)]
    phases = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts))
        for phase in trainer.phases()
    ]
    return Plan((Use("RAM", machine.ram, kept(parts), tuple(phases)),), {})


def on_gpus(cfg: Config, trainer: Trainer, machine: Machine, local: int) -> Iterator[Use]:
    """GPUs of the trainer's ranks, GPUs of a generator that has its own, and RAM."""
    gpus, generator, many = machine.gpus, cfg.generator, generators(cfg, local)
    total = min(gpus[:local], default=None)
    parts, phases = [Part("CUDA", CONTEXT, "a process"), *trainer.parts()], list(trainer.phases())
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.on_gpu
        theirs = tuple(generator.devices or range(local, local + generator.gpus * many))
        if generator.shares_gpu:
            theirs = tuple(range(local))
            held = f"{share:g} of the GPU (generator.memory), given back in between"
            phases.append(Phase("sampling", (Part("vLLM", share * (total or 0), held),)))
        own = min((gpus[i] for i in theirs if i < len(gpus)), default=None)
        yield Use(
            f"vLLM's share of GPU {' '.join(map(str, theirs))}",
            None if own is None else int(share * own),
            tuple(vllm_on_gpu(generator, trainer)),
        )
    elif cfg.has_worker:
        process = [Part("CUDA", CONTEXT, "the generator's process"), *hf_process(cfg, trainer)]
        together = -(-replicas(cfg) * many // max(1, len(gpus) - 1))  # on one GPU; rlhf.worker.environment
        parts += [times(part, together) for part in process]
    if on_gpu_store(generator):
        parts.append(shared_weights(cfg, trainer))
    names = " ".join(map(str, range(local)))
    yield Use(f"GPU {names}", total, kept(parts), tuple(phases))
    ram = [Part("processes", PROCESS * (local + replicas(cfg) * many), "Python, torch, libraries")]
    ram += [times(part, local) for part in trainer.in_ram()]
    if cfg.has_worker and not on_gpu_store(generator):
        ram.append(times(shared_weights(cfg, trainer), many))
    if isinstance(generator, VLLMConfig) and generator.shares_gpu:
        asleep = Part("vLLM asleep", vllm_weights(generator, trainer), "its weights while the trainer trains")
        ram.append(times(asleep, many))
    if isinstance(generator, WorkerConfig) and generator.annotates(cfg.schedule.max_lag, trainer.ranks, on_gpu=True):
        ram.append(Part("annotator's process", PROCESS, "Python, torch, libraries"))
    yield Use("RAM", machine.ram, kept(ram), (Phase("loading", (times(trainer.loading(), local),)),))
