"""Memory of generator processes, of weights in transfer to them, and of annotator processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.config.algorithms import Trains
from rlhf.config.generators import Transfer
from rlhf.core.machine import worker_gpu
from rlhf.generators.shares import most_versions, working_memory
from rlhf.memory import uses
from rlhf.memory.uses import BFLOAT16, CONTEXT, FLOAT32, LIBRARIES, PROCESS, Part, Use, parameters, times

if TYPE_CHECKING:
    from rlhf.config.generators import Reserved
    from rlhf.memory.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes on a host besides the ranks: those of generators, and annotators.

    Attributes:
        trainer: the memory of one rank.
        local: number of ranks on this host.
        generators: number of generators on this host; all replicas count as one generator.
        each: number of processes of one generator; 0 if it samples in the trainer's process.
        annotates: whether the run has an annotator process.
        route: how the processes get the weights if trainer and generator have GPUs.
    """

    trainer: Trainer
    local: int
    generators: int
    each: int
    annotates: bool
    route: Transfer

    @classmethod
    def of(cls, trainer: Trainer, local: int) -> Workers:
        """Return the processes besides the `local` ranks of a host."""
        generator, lag = trainer.cfg.generator, trainer.cfg.schedule.max_lag
        return cls(
            trainer,
            local,
            generators=local if generator.on_each_rank(lag) else 1,
            each=generator.processes(lag),
            annotates=generator.annotates(lag, trainer.ranks, on_gpu=trainer.device == "cuda"),
            route=generator.route(gpus=True),
        )

    @property
    def dtype(self) -> str:
        """The dtype of the weights in the generator's processes."""
        return self.trainer.cfg.generator.weights_dtype(self.trainer.cfg.model.dtype)

    @property
    def weights(self) -> float:
        """The bytes of the weights in one process of a generator."""
        return (4 if self.dtype == "float32" else 2) * self.trainer.policy.parameters

    def in_ram(self, ram: int) -> Iterator[Part]:
        """Yield the parts of a generator and its annotator on a host without GPUs, which has `ram` bytes."""
        if not self.each:
            return
        yield self.in_transfer()
        yield times(Part("generator's process", PROCESS, LIBRARIES), self.each)
        if reserved := self.trainer.cfg.generator.reserves(on_gpu=False):
            cache = f"{reserved.share:g} of RAM (generator.memory)"
            yield times(Part(f"{reserved.engine}: weights", self.weights, self.dtype), self.each)
            yield times(Part(f"{reserved.engine}: keys and values", reserved.share * ram, cache), self.each)
        else:
            yield from (times(part, self.each) for part in self._copy_that_decodes())
        if self.annotates:
            yield Part("annotator's process", PROCESS, LIBRARIES)
            yield from self._annotator()

    def in_transfer(self) -> Part:
        """Return the part of the versions of the weights that their store keeps."""
        schedule = self.trainer.cfg.schedule
        most = most_versions(self.each, schedule.in_flight)
        versions = max(2, min(self.each + schedule.max_lag, most))
        return Part("weights in transfer", versions * self.weights, f"{versions} versions in {self.dtype}")

    def of_engine(self, reserved: Reserved) -> Iterator[Part]:
        """Yield the least that an engine needs of each GPU: weights, a KV cache of one sequence."""
        engine, policy = reserved.engine, self.trainer.policy
        precision = FLOAT32 if self.dtype == "float32" else BFLOAT16
        yield Part(f"{engine}: weights", self.weights / reserved.gpus, self.dtype)
        tokens = replace(self.trainer.tokens(1, 1), prompts=1)
        cache = uses.cache_bytes(policy, tokens.length, precision)
        made_of = f"{tokens}; {engine} uses the rest of its share for more"
        yield Part(f"{engine}: keys and values", cache, made_of)
        if self.trainer.cfg.generator.shares_gpu:
            working = working_memory(
                hidden=policy.hidden,
                intermediate=policy.intermediate,
                vocabulary=policy.vocabulary,
                number_bytes=precision.product,
                sequences=reserved.sequences,
            )
            yield Part(f"{engine}: working memory", working, "activations, CUDA graphs, choice of tokens")
        yield from uses.nccl(int(reserved.gpus > 1) + int(self.route is Transfer.nccl))

    def on_gpus(self, gpus: int) -> dict[int, list[Part]]:
        """Return the parts of processes that allocate GPU memory while they use it, by the index of the GPU.

        Args:
            gpus: number of GPUs of this host; 0: unknown, then the processes share the GPUs of the ranks.
        """
        generator, local = self.trainer.cfg.generator, self.local
        count, seen = self.each * self.generators, max(gpus, local)
        found: dict[int, list[Part]] = defaultdict(list)
        if generator.decodes:
            for number in range(count):
                gpu = worker_gpu(number, seen, local, number if self.generators > 1 else 0)
                found[gpu] += [Part("CUDA", CONTEXT, "the generator's process"), *self._copy_that_decodes()]
        for rank in range(self.generators if self.annotates else 0):
            gpu = worker_gpu(count + rank, seen, local, rank, generator.reserved_gpus(local))
            found[gpu] += [Part("CUDA", CONTEXT, "the annotator's process"), *self._annotator()]
            for phase in self.trainer.phases():
                if phase.name == "log-probs and scores":
                    found[gpu] += [replace(part, name=f"annotator: {phase.name}") for part in phase.parts]
        return {gpu: [times(*each) for each in Counter(parts).items()] for gpu, parts in found.items()}

    def own_gpus(self, parts: Mapping[int, list[Part]], gpus: tuple[int, ...]) -> Iterator[Use]:
        """Yield the memory needed on the GPUs that no rank uses, joined if their parts are equal.

        Args:
            parts: the result of `on_gpus`.
            gpus: bytes of each GPU of this host.
        """
        own: dict[tuple[Part, ...], list[int]] = defaultdict(list)
        for gpu in sorted(parts):
            if gpu >= self.local:
                own[tuple(parts[gpu])].append(gpu)
        for found, alike in own.items():
            yield Use.of(f"GPU {' '.join(map(str, alike))}", min(gpus[gpu] for gpu in alike), found)

    def _copy_that_decodes(self) -> Iterator[Part]:
        trainer, count = self.trainer, self.trainer.policy.parameters
        yield Part("generator: weights", self.weights, parameters(count, self.weights))
        sampling = trainer.sampling(trainer.cfg.generator.decodes, trainer.precision(True))
        yield replace(sampling, name="generator: KV cache and logits")

    def _annotator(self) -> Iterator[Part]:
        # The annotator loads a reference model even if that of the trainer is the policy without adapters.
        models = {model.role: model for model in self.trainer.models}
        if self.trainer.cfg.algo.trains is Trains.policy:
            reference = replace(self.trainer.models[0], trained=False, adapters=None)
            models.setdefault("reference", reference)
        for role, model in models.items():
            if role in ("reference", "reward model"):
                count, footprint = self.trainer.weights(model)
                size = count * footprint.weights
                yield Part(f"annotator: {role}", size, parameters(count, size))
