"""Start of a generator's processes: one sampler process or several replicas, and the annotator process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.generators.annotating import AnnotatedGenerator
from rlhf.generators.replicas import Replica, Replicas
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.worker import WorkerGenerator
from rlhf.processes.worker import Limits, Worker

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
) -> Generator:
    """Start the sampler process of a generator (one per replica), and the annotator if `config.annotates`.

    The annotator process gets as many threads as a sampler process. With `max_lag=1`, sampler and annotator
    run in parallel only while the trainer waits and leaves its cores free. With a larger lag,
    OMP_WAIT_POLICY=PASSIVE makes waiting threads yield their cores.

    Args:
        config: the config section of the generator.
        context: the parts and settings that the run provides.
        factory: creates the sampler inside its process.
        variables: environment variables of the sampler process of each replica; the annotator gets the first.
        store: sends weights to the sampler processes; None: through shared memory, in their dtypes. The store
            of replicas is in shared memory.
    """
    limits = Limits(config.start_limit_s, config.request_limit_s, config.restarts)
    ranks, folder, in_flight = context.ranks, context.folder, context.in_flight
    suffix = f"-{ranks.rank}" if ranks.rank else ""
    log = folder / f"generator{suffix}.log"
    generator: Generator
    if config.replicas == 1:
        generator = WorkerGenerator(factory, log, variables[0], limits, in_flight, store)
    else:

        def replica(i: int, weights: SharedWeights) -> Replica:
            own_log = log.with_stem(f"generator-replica{i}") if i else log
            return Replica(factory, own_log, variables[i], limits, in_flight, weights)

        assert store is None or isinstance(store, SharedWeights), "validated: replicas use shared memory"
        generator = Replicas(replica, config.replicas, in_flight, store)
    if not config.annotates(context.max_lag, ranks.size, ranks.device.type == "cuda"):
        return generator
    annotator_log = folder / f"annotator{suffix}.log"
    annotator = Worker("annotator", context.annotator, annotator_log, variables[0], limits)
    return AnnotatedGenerator(generator, annotator, context.asks_service)
