"""GPU memory of worker processes: generator processes of `generator=hf`, and annotators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.generator import HFConfig, WorkerConfig
from rlhf.memory.generator import annotates, annotator_parts, generators, hf_process, replicas
from rlhf.memory.uses import CONTEXT, Part, Use, kept, times
from rlhf.processes.gpus import worker_gpu

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.memory.trainer import Trainer


def worker_parts(cfg: Config, trainer: Trainer, gpus: int, local: int) -> dict[int, list[Part]]:
    """Return the parts of worker processes on each GPU that they use, by the index of the GPU.

    Args:
        cfg: the config of the run.
        trainer: the memory of one rank.
        gpus: number of GPUs of this host; 0: unknown, then the processes share the GPUs of the ranks.
        local: number of ranks on this host.
    """
    generator, many = cfg.generator, generators(cfg, local)
    found: dict[int, list[Part]] = defaultdict(list)
    if not isinstance(generator, WorkerConfig):
        return found
    processes, seen = replicas(cfg) * many, max(gpus, local)
    if isinstance(generator, HFConfig):
        for number in range(processes):
            gpu = worker_gpu(number, seen, local, number if generator.per_rank else 0)
            found[gpu] += [Part("CUDA", CONTEXT, "the generator's process"), *hf_process(cfg, trainer)]
    if annotates(cfg, trainer.ranks, on_gpu=True):
        for rank in range(many):
            gpu = worker_gpu(processes + rank, seen, local, rank, generator.reserved_gpus(local))
            found[gpu] += annotator_on_gpu(trainer)
    return {gpu: [times(*each) for each in Counter(parts).items()] for gpu, parts in found.items()}


def annotator_on_gpu(trainer: Trainer) -> Iterator[Part]:
    """Yield the parts of an annotator on a GPU: its CUDA context, its models, and their forward passes."""
    yield Part("CUDA", CONTEXT, "the annotator's process")
    _, *loaded = annotator_parts(trainer)  # without the first part, which is in RAM
    yield from loaded
    for phase in trainer.phases():
        if phase.name == "log-probs and scores":
            yield from (replace(part, name=f"annotator: {phase.name}") for part in phase.parts)


def shared_with_ranks(parts: Mapping[int, list[Part]], local: int) -> list[Part]:
    """Return the parts of worker processes on the GPU of a rank, for the rank with the most of them."""
    return max((found for gpu, found in parts.items() if gpu < local), key=size, default=[])


def own_gpus(parts: Mapping[int, list[Part]], gpus: tuple[int, ...], local: int) -> Iterator[Use]:
    """Yield the memory needed on the GPUs that only worker processes use, joined if their parts are equal."""
    own: dict[tuple[Part, ...], list[int]] = defaultdict(list)
    for gpu in sorted(parts):
        if gpu >= local:
            own[kept(parts[gpu])].append(gpu)
    for found, alike in own.items():
        yield Use(f"GPU {' '.join(map(str, alike))}", min(gpus[gpu] for gpu in alike), found)


def size(parts: list[Part]) -> float:
    """Return the sum of the sizes of parts in bytes."""
    return sum(part.bytes for part in parts)
