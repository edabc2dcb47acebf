"""Start of a generator's processes: one sampler process or several replicas, and the annotator process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rlhf.core.launched import local_rank, local_world_size
from rlhf.generators.annotating import AnnotatedGenerator
from rlhf.generators.replicas import Replica, Replicas
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.worker import WorkerGenerator
from rlhf.processes.worker import Limits, Worker, environment

if TYPE_CHECKING:
    from rlhf.config.generator import WorkerConfig
    from rlhf.generators.generator import Generator, GeneratorContext
    from rlhf.generators.sampler import SamplerFactory
    from rlhf.generators.transfer.weights import WeightStore


def start(
    config: WorkerConfig,
    context: GeneratorContext,
    factory: SamplerFactory,
    variables: Sequence[dict[str, str]],
    store: WeightStore | None = None,
    single: Callable[..., WorkerGenerator] | None = None,
) -> Generator:
    """Start the sampler process of a generator (one per replica), and the annotator if `config.annotates`.

    The annotator process gets as many threads as a sampler process. With `max_lag=1`, sampler and annotator
    run in parallel only while the trainer waits and leaves its cores free. With a larger lag,
    OMP_WAIT_POLICY=PASSIVE makes waiting threads yield their cores. The GPU of the annotator is one that
    neither a rank nor vLLM uses, if there is one, otherwise the GPU of its rank; see `worker_gpu`.

    Args:
        config: the config section of the generator.
        context: the parts and settings that the run provides.
        factory: creates the sampler inside its process.
        variables: environment variables of the sampler process of each replica.
        store: sends weights to the sampler processes; None: through shared memory, in their dtypes. The store
            of replicas is in shared memory.
        single: creates the generator if there is one replica, from the arguments of `WorkerGenerator`; None:
            `WorkerGenerator`.
    """
    start_s = config.start_limit(on_gpu=torch.cuda.is_available())
    limits = Limits(start_s, config.request_limit_s, config.restarts)
    ranks, folder, in_flight = context.ranks, context.folder, context.in_flight
    suffix = f"-{ranks.rank}" if ranks.rank else ""
    log = folder / f"generator{suffix}.log"
    generator: Generator
    if config.replicas == 1:
        generator = (single or WorkerGenerator)(factory, log, variables[0], limits, in_flight, store)
    else:

        def replica(i: int, weights: SharedWeights) -> Replica:
            own_log = log.with_stem(f"generator-replica{i}") if i else log
            return Replica(factory, own_log, variables[i], limits, in_flight, weights)

        assert store is None or isinstance(store, SharedWeights), "validated: replicas use shared memory"
        generator = Replicas(replica, config.replicas, in_flight, store)
    return annotated(generator, config, context)


def annotated(generator: Generator, config: WorkerConfig, context: GeneratorContext) -> Generator:
    """Return a generator whose rollouts an annotator process scores, if `config.annotates`."""
    ranks = context.ranks
    if not config.annotates(context.max_lag, ranks.size, ranks.device.type == "cuda"):
        return generator
    start_s = config.start_limit(on_gpu=torch.cuda.is_available())
    limits = Limits(start_s, config.request_limit_s, config.restarts)
    suffix = f"-{ranks.rank}" if ranks.rank else ""
    number = config.replicas * (local_world_size() if config.per_rank else 1) + local_rank()
    reserved = config.reserved_gpus(local_world_size())
    own = environment(context.threads, ranks.device, number, reserved)
    log = context.folder / f"annotator{suffix}.log"
    annotator = Worker("annotator", context.annotator, log, own, limits)
    return AnnotatedGenerator(generator, annotator, context.asks_service)
