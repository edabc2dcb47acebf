"""Memory of the generator and the annotator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.generator import HFConfig, Transfer, VLLMConfig, WorkerConfig
from rlhf.memory import activations
from rlhf.memory.activations import BFLOAT16, FLOAT32
from rlhf.memory.uses import PROCESS, Part, in_words, parameters, times

if TYPE_CHECKING:
    from rlhf.config.generator import GeneratorConfig
    from rlhf.config.root import Config
    from rlhf.memory.trainer import Trainer


def generators(cfg: Config, local: int) -> int:
    """How many times a host with `local` ranks has the generator, all its replicas."""
    return local if isinstance(cfg.generator, WorkerConfig) and cfg.generator.per_rank else 1


def on_gpu_store(generator: GeneratorConfig) -> bool:
    """Whether versions in transfer lie on the trainer's GPU: as `rlhf.generators.vllm.route` has it there."""
    if not isinstance(generator, VLLMConfig) or generator.transfer is Transfer.shared_memory:
        return False
    shares = generator.shares_gpu and generator.tensor_parallel_size > 1
    return generator.transfer is not Transfer.auto or (generator.replicas == 1 and not shares)


def generator_parts(cfg: Config, trainer: Trainer, ram: int) -> Iterator[Part]:
    """A generator's own process and what is shared with it, all in RAM."""
    generator = cfg.generator
    if not cfg.has_worker:
        return
    yield shared_weights(cfg, trainer)
    held = [Part("generator's process", PROCESS, "Python, torch, libraries")]
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.in_ram
        held.append(Part("vLLM: weights", vllm_weights(generator, trainer), precision_of(generator, cfg)))
        held.append(Part("vLLM: keys and values", share * ram, f"{share:g} of RAM (generator.memory)"))
    else:
        held += hf_process(cfg, trainer)
    for part in held:
        yield times(part, replicas(cfg))
    if isinstance(generator, WorkerConfig) and generator.annotates(cfg.schedule.max_lag, trainer.ranks, on_gpu=False):
        yield from annotator_parts(trainer)


def annotator_parts(trainer: Trainer) -> Iterator[Part]:
    """A process that scores ahead, with models of its own: a whole reference also where the trainer's is
    the policy without its adapters.
    """
    yield Part("annotator's process", PROCESS, "Python, torch, libraries")
    loaded = {model.role: model for model in trainer.models}
    if trainer.cfg.algo.trains is Trains.policy:
        loaded.setdefault("reference", replace(trainer.models[0], trained=False, adapters=None))
    for role, model in loaded.items():
        if role in ("reference", "reward model"):
            count, held_as = trainer.weights(model)
            held = count * held_as.weights
            yield Part(f"annotator: {role}", held, parameters(count, held))


def replicas(cfg: Config) -> int:
    """How many processes the generator has."""
    generator = cfg.generator
    if not cfg.has_worker:
        return 0
    return generator.replicas if isinstance(generator, WorkerConfig) else 1


def hf_process(cfg: Config, trainer: Trainer) -> Iterator[Part]:
    """A copy of the policy, and its decoding, on the trainer's device."""
    assert isinstance(cfg.generator, HFConfig)
    count = trainer.policy.parameters
    yield Part("generator: weights", 4 * count, parameters(count, 4 * count))
    held = trainer.sampling(cfg.generator.batch_size, trainer.precision(True))
    yield replace(held, name="generator: keys, values, choice")


def shared_weights(cfg: Config, trainer: Trainer) -> Part:
    """Versions of the weights: the one confirmed last, and those that wait."""
    generator = cfg.generator
    versions = max(2, replicas(cfg) + cfg.schedule.max_lag)
    if isinstance(generator, VLLMConfig) and on_gpu_store(generator):
        held = versions * vllm_weights(generator, trainer)
        said = f"{versions} versions in {precision_of(generator, cfg)}, on the trainer's GPU"
        return Part("weights in transfer", held, said)
    held = versions * 4 * trainer.policy.parameters
    return Part("weights in transfer", held, f"{versions} versions in float32, in shared memory")


def vllm_weights(generator: VLLMConfig, trainer: Trainer) -> float:
    """The weights of one vLLM, on all its GPUs together."""
    low = precision_of(generator, trainer.cfg) != "float32"
    return (2 if low else 4) * trainer.policy.parameters


def precision_of(generator: VLLMConfig, cfg: Config) -> str:
    """What vLLM computes in."""
    return str((generator.dtype or cfg.model.dtype).value)


def vllm_on_gpu(generator: VLLMConfig, trainer: Trainer) -> Iterator[Part]:
    """The least that vLLM needs of its share of a GPU; it takes all of that for keys and values."""
    weights = vllm_weights(generator, trainer) / generator.tensor_parallel_size
    yield Part("vLLM: weights", weights, precision_of(generator, trainer.cfg))
    precision = FLOAT32 if precision_of(generator, trainer.cfg) == "float32" else BFLOAT16
    tokens = replace(trainer.tokens(1, 1), prompts=1)
    held = activations.cache_bytes(trainer.policy, tokens.length, precision)
    yield Part("vLLM: keys and values", held, f"{in_words(tokens)}; it uses the rest for more")
