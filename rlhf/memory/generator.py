"""Memory of generator processes, of weights in transfer to them, and of the annotator process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.generator import HFConfig, Transfer, VLLMConfig, WorkerConfig
from rlhf.generators.transfer.kept_versions import most_versions
from rlhf.generators.vllm.gpu_share import working_memory
from rlhf.memory import activations
from rlhf.memory.activations import BFLOAT16, FLOAT32
from rlhf.memory.communication import nccl, sends_by_nccl
from rlhf.memory.uses import PROCESS, Part, in_words, parameters, times

if TYPE_CHECKING:
    from rlhf.config.generator import GeneratorConfig
    from rlhf.config.root import Config
    from rlhf.memory.trainer import Trainer


def generators(cfg: Config, local: int) -> int:
    """Return the number of generators on a host with `local` ranks; all replicas count as one generator."""
    return local if isinstance(cfg.generator, WorkerConfig) and cfg.generator.per_rank else 1


def on_gpu_store(generator: GeneratorConfig) -> bool:
    """Return whether weights in transfer are stored on the trainer's GPU.

    The rule is that of `rlhf.generators.vllm.generator.route`, if trainer and vLLM both run on GPUs.
    """
    if not isinstance(generator, VLLMConfig) or generator.transfer is Transfer.shared_memory:
        return False
    shares = generator.shares_gpu and generator.tensor_parallel_size > 1
    return generator.transfer is not Transfer.auto or (generator.replicas == 1 and not shares)


def generator_parts(cfg: Config, trainer: Trainer, ram: int) -> Iterator[Part]:
    """Yield the parts of the generator processes, of weights in transfer and of the annotator, all in RAM."""
    generator = cfg.generator
    if not cfg.has_worker:
        return
    yield shared_weights(cfg, trainer)
    parts = [Part("generator's process", PROCESS, "Python, torch, libraries")]
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.in_ram
        parts.append(Part("vLLM: weights", vllm_weights(generator, trainer), precision_of(generator, cfg)))
        parts.append(Part("vLLM: keys and values", share * ram, f"{share:g} of RAM (generator.memory)"))
    else:
        parts += hf_process(cfg, trainer)
    for part in parts:
        yield times(part, replicas(cfg))
    if annotates(cfg, trainer.ranks, on_gpu=False):
        yield from annotator_parts(trainer)


def annotates(cfg: Config, ranks: int, on_gpu: bool) -> bool:
    """Return whether the run `cfg` with `ranks` ranks has an annotator process."""
    generator = cfg.generator
    return isinstance(generator, WorkerConfig) and generator.annotates(
        cfg.schedule.max_lag, ranks, on_gpu=on_gpu
    )


def annotator_parts(trainer: Trainer) -> Iterator[Part]:
    """Yield the parts of the annotator process, which loads its own reference model and its own reward model.

    The reference model of the annotator is a separate model, even if the reference of the trainer is the
    policy without its adapters.
    """
    yield Part("annotator's process", PROCESS, "Python, torch, libraries")
    loaded = {model.role: model for model in trainer.models}
    if trainer.cfg.algo.trains is Trains.policy:
        loaded.setdefault("reference", replace(trainer.models[0], trained=False, adapters=None))
    for role, model in loaded.items():
        if role in ("reference", "reward model"):
            count, footprint = trainer.weights(model)
            size = count * footprint.weights
            yield Part(f"annotator: {role}", size, parameters(count, size))


def replicas(cfg: Config) -> int:
    """Return the number of processes of one generator; 0 if it samples in the trainer's process."""
    generator = cfg.generator
    if not cfg.has_worker:
        return 0
    return generator.replicas if isinstance(generator, WorkerConfig) else 1


def hf_process(cfg: Config, trainer: Trainer) -> Iterator[Part]:
    """Yield the parts of a process of `generator=hf`: a float32 copy of the policy, and decoding memory."""
    assert isinstance(cfg.generator, HFConfig)
    count = trainer.policy.parameters
    yield Part("generator: weights", 4 * count, parameters(count, 4 * count))
    sampling = trainer.sampling(cfg.generator.batch_size, trainer.precision(True))
    yield replace(sampling, name="generator: keys, values, choice")


def shared_weights(cfg: Config, trainer: Trainer) -> Part:
    """Return the part of the weights in transfer: the versions that the store of the weights keeps.

    The weights are on the trainer's GPU if `on_gpu_store`, otherwise in shared memory.
    """
    generator = cfg.generator
    processes, schedule = replicas(cfg), cfg.schedule
    most = most_versions(processes, schedule.in_flight)
    versions = max(2, min(processes + schedule.max_lag, most))
    size, precision = 4.0 * trainer.policy.parameters, "float32"
    if isinstance(generator, VLLMConfig):
        size, precision = vllm_weights(generator, trainer), precision_of(generator, cfg)
    return Part("weights in transfer", versions * size, f"{versions} versions in {precision}")


def vllm_weights(generator: VLLMConfig, trainer: Trainer) -> float:
    """Return the bytes of the weights of one vLLM process, summed over its GPUs."""
    low = precision_of(generator, trainer.cfg) != "float32"
    return (2 if low else 4) * trainer.policy.parameters


def precision_of(generator: VLLMConfig, cfg: Config) -> str:
    """Return the name of the dtype in which vLLM computes."""
    return str((generator.dtype or cfg.model.dtype).value)


def vllm_on_gpu(generator: VLLMConfig, trainer: Trainer) -> Iterator[Part]:
    """Yield the minimum parts of vLLM on each GPU: weights, and keys and values of one sequence."""
    weights = vllm_weights(generator, trainer) / generator.tensor_parallel_size
    yield Part("vLLM: weights", weights, precision_of(generator, trainer.cfg))
    precision = FLOAT32 if precision_of(generator, trainer.cfg) == "float32" else BFLOAT16
    tokens = replace(trainer.tokens(1, 1), prompts=1)
    cache = activations.cache_bytes(trainer.policy, tokens.length, precision)
    made_of = f"{in_words(tokens)}; vLLM uses the rest of its share for more"
    yield Part("vLLM: keys and values", cache, made_of)
    if generator.shares_gpu:
        working = working_memory(
            hidden=trainer.policy.hidden,
            intermediate=trainer.policy.intermediate,
            vocabulary=trainer.policy.vocabulary,
            number_bytes=precision.product,
            sequences=generator.max_num_seqs,
        )
        yield Part("vLLM: working memory", working, "activations, CUDA graphs, choice of tokens")
    yield from nccl(int(generator.tensor_parallel_size > 1) + sends_by_nccl(generator))
