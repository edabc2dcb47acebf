"""Memory of generator processes, of weights in transfer to them, and of annotator processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.algorithms import Trains
from rlhf.config.generators import Transfer
from rlhf.core.machine import worker_gpu
from rlhf.generators.shares import most_versions, working_memory
from rlhf.memory import uses
from rlhf.memory.uses import (
    BFLOAT16,
    CONTEXT,
    FLOAT32,
    LIBRARIES,
    PROCESS,
    Part,
    Use,
    in_words,
    kept,
    nccl,
    parameters,
    times,
)

if TYPE_CHECKING:
    from rlhf.config.generators import Reserved
    from rlhf.config.root import Config
    from rlhf.memory.trainer import Trainer


def generators(cfg: Config, local: int) -> int:
    """Return the number of generators on a host with `local` ranks; all replicas count as one generator."""
    return local if cfg.generator.on_each_rank(cfg.schedule.max_lag) else 1


def processes(cfg: Config) -> int:
    """Return the number of processes of one generator; 0 if it samples in the trainer's process."""
    return cfg.generator.processes(cfg.schedule.max_lag)


def sent_on_gpu(cfg: Config) -> bool:
    """Return whether weights in transfer are on the trainer's GPU, if the generator has GPUs, too."""
    return cfg.generator.route(gpus=True) is not Transfer.shared_memory


def sent_by_nccl(cfg: Config) -> bool:
    """Return whether the trainer's GPU and those of the generator form a group of NCCL."""
    return cfg.generator.route(gpus=True) is Transfer.nccl


def annotates(cfg: Config, ranks: int, on_gpu: bool) -> bool:
    """Return whether the run `cfg` with `ranks` ranks has an annotator process."""
    return cfg.generator.annotates(cfg.schedule.max_lag, ranks, on_gpu=on_gpu)


def parts_in_ram(cfg: Config, trainer: Trainer, ram: int) -> Iterator[Part]:
    """Yield the parts of a generator and its annotator on a host without GPUs, which has `ram` bytes."""
    generator, count = cfg.generator, processes(cfg)
    if not count:
        return
    yield weights_in_transfer(cfg, trainer)
    yield times(Part("generator's process", PROCESS, LIBRARIES), count)
    if reserved := generator.reserves(on_gpu=False):
        weights, dtype = _weights(trainer), generator.weights_dtype(cfg.model.dtype)
        cache = f"{reserved.share:g} of RAM (generator.memory)"
        yield times(Part(f"{reserved.engine}: weights", weights, dtype), count)
        yield times(Part(f"{reserved.engine}: keys and values", reserved.share * ram, cache), count)
    else:
        yield from (times(part, count) for part in _copy_that_decodes(trainer))
    if annotates(cfg, trainer.ranks, on_gpu=False):
        yield Part("annotator's process", PROCESS, LIBRARIES)
        yield from _annotator(trainer)


def weights_in_transfer(cfg: Config, trainer: Trainer) -> Part:
    """Return the part of the versions of the weights that their store keeps."""
    count, schedule = processes(cfg), cfg.schedule
    versions = max(2, min(count + schedule.max_lag, most_versions(count, schedule.in_flight)))
    dtype = cfg.generator.weights_dtype(cfg.model.dtype)
    return Part("weights in transfer", versions * _weights(trainer), f"{versions} versions in {dtype}")


def parts_of_engine(reserved: Reserved, trainer: Trainer) -> Iterator[Part]:
    """Yield the least that an engine needs of its share of each GPU: weights, a KV cache of one sequence."""
    cfg, engine = trainer.cfg, reserved.engine
    dtype = cfg.generator.weights_dtype(cfg.model.dtype)
    precision = FLOAT32 if dtype == "float32" else BFLOAT16
    yield Part(f"{engine}: weights", _weights(trainer) / reserved.gpus, dtype)
    tokens = replace(trainer.tokens(1, 1), prompts=1)
    cache = uses.cache_bytes(trainer.policy, tokens.length, precision)
    made_of = f"{in_words(tokens)}; {engine} uses the rest of its share for more"
    yield Part(f"{engine}: keys and values", cache, made_of)
    if cfg.generator.shares_gpu:
        working = working_memory(
            hidden=trainer.policy.hidden,
            intermediate=trainer.policy.intermediate,
            vocabulary=trainer.policy.vocabulary,
            number_bytes=precision.product,
            sequences=reserved.sequences,
        )
        yield Part(f"{engine}: working memory", working, "activations, CUDA graphs, choice of tokens")
    yield from nccl(int(reserved.gpus > 1) + sent_by_nccl(cfg))


def parts_on_gpus(cfg: Config, trainer: Trainer, gpus: int, local: int) -> dict[int, list[Part]]:
    """Return the parts of processes that allocate GPU memory while they use it, by the index of the GPU.

    Args:
        cfg: the config of the run.
        trainer: the memory of one rank.
        gpus: number of GPUs of this host; 0: unknown, then the processes share the GPUs of the ranks.
        local: number of ranks on this host.
    """
    generator, many = cfg.generator, generators(cfg, local)
    count, seen = processes(cfg) * many, max(gpus, local)
    found: dict[int, list[Part]] = defaultdict(list)
    if generator.decodes:
        for number in range(count):
            gpu = worker_gpu(number, seen, local, number if many > 1 else 0)
            found[gpu] += [Part("CUDA", CONTEXT, "the generator's process"), *_copy_that_decodes(trainer)]
    if annotates(cfg, trainer.ranks, on_gpu=True):
        for rank in range(many):
            gpu = worker_gpu(count + rank, seen, local, rank, generator.reserved_gpus(local))
            found[gpu] += _annotator_on_gpu(trainer)
    return {gpu: [times(*each) for each in Counter(parts).items()] for gpu, parts in found.items()}


def shared_with_ranks(parts: Mapping[int, list[Part]], local: int) -> list[Part]:
    """Return the parts of `parts_on_gpus` on the GPU of a rank, for the rank with the most of them."""
    on_ranks = (found for gpu, found in parts.items() if gpu < local)
    return max(on_ranks, key=lambda found: sum(part.bytes for part in found), default=[])


def own_gpus(parts: Mapping[int, list[Part]], gpus: tuple[int, ...], local: int) -> Iterator[Use]:
    """Yield the memory needed on the GPUs that no rank uses, joined if their parts are equal."""
    own: dict[tuple[Part, ...], list[int]] = defaultdict(list)
    for gpu in sorted(parts):
        if gpu >= local:
            own[kept(parts[gpu])].append(gpu)
    for found, alike in own.items():
        yield Use(f"GPU {' '.join(map(str, alike))}", min(gpus[gpu] for gpu in alike), found)


def _weights(trainer: Trainer) -> float:
    dtype = trainer.cfg.generator.weights_dtype(trainer.cfg.model.dtype)
    return (4 if dtype == "float32" else 2) * trainer.policy.parameters


def _copy_that_decodes(trainer: Trainer) -> Iterator[Part]:
    size = _weights(trainer)
    yield Part("generator: weights", size, parameters(trainer.policy.parameters, size))
    sampling = trainer.sampling(trainer.cfg.generator.decodes, trainer.precision(True))
    yield replace(sampling, name="generator: KV cache and logits")


def _annotator(trainer: Trainer) -> Iterator[Part]:
    # The annotator's reference is a model, even if the trainer's reference is the policy without adapters.
    loaded = {model.role: model for model in trainer.models}
    if trainer.cfg.algo.trains is Trains.policy:
        loaded.setdefault("reference", replace(trainer.models[0], trained=False, adapters=None))
    for role, model in loaded.items():
        if role in ("reference", "reward model"):
            count, footprint = trainer.weights(model)
            size = count * footprint.weights
            yield Part(f"annotator: {role}", size, parameters(count, size))


def _annotator_on_gpu(trainer: Trainer) -> Iterator[Part]:
    yield Part("CUDA", CONTEXT, "the annotator's process")
    yield from _annotator(trainer)
    for phase in trainer.phases():
        if phase.name == "log-probs and scores":
            yield from (replace(part, name=f"annotator: {phase.name}") for part in phase.parts)
