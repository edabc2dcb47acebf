"""Memory of the processes of a run: a rank of the trainer, generators, annotators, and their messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.config.algorithms import Trains
from rlhf.config.generators import Transfer, most_versions, working_memory
from rlhf.config.models import Dtype
from rlhf.config.schedule import Optimizer
from rlhf.core.machine import worker_gpu
from rlhf.memory.sizes import adapter_parameters, linear_shapes, matrix_parameters, most_sequences
from rlhf.memory.uses import (
    AUTOCAST,
    BFLOAT16,
    CONTEXT,
    FLOAT32,
    LIBRARIES,
    PROCESS,
    UNRELEASED,
    Forward,
    Part,
    Phase,
    Tokens,
    Use,
    nccl,
)
from rlhf.models import folder

if TYPE_CHECKING:
    from rlhf.config.backends import Footprint
    from rlhf.config.generators import Reserved
    from rlhf.config.root import Config
    from rlhf.memory.sizes import Model

_BLOCK = 256  # elements of a moment that have a common float32 scale
EIGHT_BIT = 2 * (1 + 4 / _BLOCK)  # bytes per parameter of two moments of 8 bits
_MOMENTUM = 4  # bytes per parameter of Muon's state
_ITERATION = 10  # bytes per element of a matrix during Muon's step: a float32 update, three bfloat16 copies


class Trainer:
    """The memory that one rank of the trainer needs: permanent parts, and the phases of an update.

    Args:
        cfg: the config of the run.
        models: the models that the rank loads, trained models first.
        ranks: number of ranks of the run.
        device: "cpu" or "cuda".

    Attributes:
        policy: the size of the first model: the policy, or the reward model of `algo=reward`.
        footprint: bytes per parameter of a trained model.
        gathers: whether weights are sharded or offloaded, so that all ranks run every forward pass together.
        frozen: bytes per number in forward passes of frozen models, whose weights have the dtype of the run.
        trained: bytes per number in forward passes of trained models.
    """

    def __init__(self, cfg: Config, models: tuple[Model, ...], ranks: int, device: str) -> None:
        self.cfg, self.models, self.ranks, self.device = cfg, models, ranks, device
        self.policy = models[0].counted
        self.footprint = cfg.backend.footprint()
        self.gathers = self.footprint.gathered
        self.frozen = FLOAT32 if cfg.model.dtype is Dtype.float32 else BFLOAT16
        self.trained = self.frozen if self.frozen is FLOAT32 or cfg.model.lora.rank else AUTOCAST
        self._how: dict[str, Any] = {"eager": cfg.model.attention == "eager", "device": device}

    def tokens(self, sequences: int, samples: int) -> Tokens:
        """Return the tokens of a forward pass with sequences of the maximum length.

        Args:
            sequences: the maximum number of sequences, but at least all samples of one prompt are included.
            samples: samples per prompt.
        """
        cfg = self.cfg
        share = -(-cfg.schedule.prompts_per_update // self.ranks)
        prompts = max(1, min(sequences // samples, share))
        return Tokens(
            prompts=prompts,
            samples=samples,
            prompt=cfg.task.max_prompt_tokens,
            response=cfg.generator.response_length,
            apart=cfg.model.shared_prefix
            and folder.prompt_apart(
                samples,
                prompts * cfg.task.max_prompt_tokens,
                layers=self.policy.layers,
                hidden=self.policy.hidden,
                gpu=self.device == "cuda",
                whole=self.gathers,
            ),
        )

    def weights(self, model: Model) -> tuple[int, Footprint]:
        """Return the number of parameters of a model without its adapters, and their footprint."""
        whole = model.trained and model.adapters is None
        footprint = self.footprint if whole else replace(self.footprint, weights=self.frozen.residual)
        return model.counted.parameters, footprint

    def stored(self) -> Iterator[tuple[Model, str, str, int, Footprint]]:
        """Yield everything that is stored of the models during the whole run.

        Yields:
            The model, the name of the part, its kind in a footprint, its number of parameters, its footprint.
        """
        for model in self.models:
            yield model, "weights", "weights", *self.weights(model)
            if model.adapters is not None:
                yield model, "adapters", "weights", model.adapters, self.footprint
            if model.trained:
                each = EIGHT_BIT  # `footprint` has the bytes of AdamW
                if self.cfg.optim.optimizer is not Optimizer.adamw_8bit:
                    share = self._updated_by_muon(model) / max(1, model.trainable)
                    each = _MOMENTUM * share + self.footprint.optimizer * (1 - share)
                states = replace(self.footprint, optimizer=each)
                yield model, "optimizer", "optimizer", model.trainable, states
                yield model, "gradients", "gradients", model.trainable, self.footprint

    def parts(self) -> Iterator[Part]:
        """Yield the permanent parts on the device: weights, adapters, optimizer states."""
        if self.device == "cpu":
            yield Part("process", PROCESS, LIBRARIES)
        for model, name, kind, count, footprint in self.stored():
            if kind != "gradients":
                size = footprint.on_device(kind, count, self.ranks)
                yield Part.of_parameters(f"{model.role}: {name}", count, size)

    def in_ram(self) -> Iterator[Part]:
        """Yield the parts that the backend offloads to RAM."""
        sizes: dict[str, float] = defaultdict(float)
        for model, _, kind, count, footprint in self.stored():
            sizes[model.role] += footprint.in_ram(kind, count, self.ranks)
        for model in self.models:
            count = model.counted.parameters
            yield Part.of_parameters(f"{model.role}: offloaded", count, sizes[model.role])

    def loading(self, local: int) -> Part:
        """Return the part of all models in RAM while `local` ranks load them, before they are on the GPU.

        As in `rlhf.assembly.models.loaded`, only rank 0 loads weights that are sharded, and hosts without
        rank 0 load no models.
        """
        alone = self.gathers and self.ranks > 1 and not self.cfg.model.trust_remote_code
        each = (count * stored.weights for count, stored in map(self.weights, self.models))
        return Part("models", sum(each), "before they are moved to the GPU").times(1 if alone else local)

    def gradients(self) -> Iterator[Part]:
        """Yield gradients on the device, the largest gathered layer, and the gradients in a message."""
        trained = 0
        for model, _, kind, count, footprint in self.stored():
            if kind != "gradients":
                continue
            trained += count
            size = footprint.on_device("gradients", count, self.ranks)
            yield Part.of_parameters(f"{model.role}: gradients", count, size)
            if self.gathers:
                counted, gradients = model.counted, footprint.gradients if model.adapters is None else 0
                block = counted.backbone // max(1, counted.layers)
                layer = max(block, counted.vocabulary * counted.hidden)
                each = self.weights(model)[1].weights + gradients
                yield Part(f"{model.role}: one layer", layer * each, "gathered from all ranks")
        if self.ranks > 1 and trained:  # copies of the gradients that one message between the ranks contains
            count = min(self.footprint.bucket, trained)
            size = 4 * self.footprint.copies * count
            yield Part.of_parameters("gradient bucket", count, size, estimated=True)

    def phases(self) -> Iterator[Phase]:
        """Yield the phases: training, optimizer step, log-probs and scores, sampling in this process."""
        cfg, gradients = self.cfg, tuple(self.gradients())
        samples, kept = cfg.algo.samples_per_prompt, cfg.algo.keeps or cfg.algo.samples_per_prompt
        trained = [model for model in self.models if model.trained]
        prompts = cfg.schedule.prompts_per_update // max(1, cfg.schedule.minibatches)
        minibatch = -(-prompts // self.ranks) * kept  # sequences of one optimizer step on one rank
        tokens = self.tokens(min(most_sequences(cfg), minibatch), kept)
        activations = (self._activations(model, tokens, backward=True) for model in trained)
        yield Phase("training", (*gradients, *activations))
        if self.device == "cuda" and "optimizer" not in self.footprint.offloaded:
            yield Phase("optimizer step", (*gradients, self._updates(trained)))
        reads = [
            self._activations(model, self.tokens(model.batch_size, each), backward=False)
            for model in self.models
            for each in (samples, 1)
        ]
        yield Phase("log-probs and scores", (max(reads, key=lambda part: part.bytes),))
        copy = tuple(self._whole_copy())
        # Evaluations sample even if the generator does not.
        decodes = cfg.generator.decodes if cfg.generator.samples else cfg.eval.batch_size
        if cfg.algo.trains is Trains.reward or not decodes:
            return
        if not cfg.has_worker:
            yield Phase("sampling", (*copy, self.sampling(decodes)))
        elif copy:  # `rlhf.trials.trials.samples_with_cache`
            yield Phase("comparison of sampling", copy)

    def unreleased(self) -> Iterator[Part]:
        """Yield the memory, besides the permanent parts, that the trainer keeps while vLLM uses its GPU.

        Before vLLM samples, the trainer returns segments of memory without any tensor to the GPU. Segments
        that contain both a permanent tensor and freed memory remain. ZeRO-3 keeps its gradients.
        """
        if self.gathers:
            yield from (part for part in self.gradients() if part.name.endswith(": gradients"))
        largest = max(self.phases(), key=lambda phase: phase.bytes)
        made_of = f"{UNRELEASED:.0%} of the memory of {largest.name}"
        yield Part("trainer: memory torch cannot return", UNRELEASED * largest.bytes, made_of, estimated=True)

    def sampling(self, batch_size: int) -> Part:
        """Return the memory of decoding without the weights: the larger value of rollouts and evaluation.

        Args:
            batch_size: sequences decoded in parallel.
        """
        cfg = self.cfg
        requests = [self.tokens(batch_size, cfg.algo.samples_per_prompt)] if cfg.generator.samples else []
        if cfg.schedule.eval_every:
            single = self.tokens(batch_size, 1)
            requests.append(replace(single, prompts=min(batch_size, cfg.eval.prompts)))
        sizes = {
            tokens: Forward(size=self.policy, tokens=tokens, precision=self.trained, **self._how).sampling()
            for tokens in requests
        }
        if not sizes:
            return Part("nothing", 0)
        largest = max(sizes, key=sizes.__getitem__)
        return Part("KV cache and logits", sizes[largest], str(largest), estimated=True)

    def _updated_by_muon(self, model: Model) -> int:
        """Return the number of parameters of a model that Muon updates."""
        if self.cfg.optim.optimizer is not Optimizer.muon or not model.trained:
            return 0
        if model.adapters is None:
            return min(matrix_parameters(model.counted), model.trainable)
        return adapter_parameters(model.counted, self.cfg.model.lora.rank, self.cfg.model.lora.targets)

    def _updates(self, trained: list[Model]) -> Part:
        """Return the part of temporary tensors of an optimizer step.

        Muon updates one matrix after the other. The kernel of AdamW with 8-bit moments has no such tensors.
        """
        count, size = sum(model.trainable for model in trained), 0.0
        if self.cfg.optim.optimizer is not Optimizer.adamw_8bit:
            size = self.footprint.step * sum(m.trainable - self._updated_by_muon(m) for m in trained)
        if self.cfg.optim.optimizer is Optimizer.muon:
            shapes = (linear_shapes(model.counted).values() for model in trained)
            size += _ITERATION * max(inputs * outputs for each in shapes for inputs, outputs in each)
        size /= self.ranks if "optimizer" in self.footprint.sharded else 1
        return Part.of_parameters("updates", count, size)

    def _activations(self, model: Model, tokens: Tokens, backward: bool) -> Part:
        """Return the part of the activations of a forward pass, with `backward` also of the backward pass.

        On a GPU, shorter prompts without a separate pass may need more memory than longer prompts with one.
        """
        requests = [tokens]
        if tokens.apart and self.device == "cuda" and not self.gathers:
            shorter = folder.prompt_pass_pays_from(tokens.samples, self.policy.hidden) / tokens.prompts
            requests.append(replace(tokens, prompt=max(1, int(shorter)), apart=False))
        precision = self.trained if model.trained else self.frozen
        passes = [
            Forward(size=model.counted, tokens=each, precision=precision, **self._how) for each in requests
        ]
        if not backward:
            size = max(each.inference() for each in passes)
            return Part(model.role, size, str(tokens), estimated=True)
        size = max(each.training(self.cfg.model.gradient_checkpointing) for each in passes)
        return Part(f"{model.role}: activations", size, str(tokens), estimated=True)

    def _whole_copy(self) -> Iterator[Part]:
        """Yield the whole copy of the policy from which a rank samples, if the weights are divided.

        `DeepSpeedEngine.whole` builds the copy on each rank, without adapters. Its weights are float32. With
        bfloat16, the weights of linear layers are bfloat16, except for a head that is tied or in float32.
        """
        if not self.gathers:
            return
        count, model = self.policy.parameters, self.cfg.model
        size = 4 * count
        if model.dtype is Dtype.bfloat16:
            head = 0 if model.float32_head else self.policy.head
            size -= 2 * (matrix_parameters(self.policy) + head)
        yield Part.of_parameters("policy: whole copy", count, size)


class Workers:
    """The processes on a host besides the ranks: those of generators, and annotators.

    Args:
        trainer: the memory of one rank.
        local: number of ranks on this host.

    Attributes:
        generators: number of generators on this host; all replicas count as one generator.
        each: number of processes of one generator; 0 if it samples in the trainer's process.
        annotates: whether the run has an annotator process.
        route: how the processes get the weights if trainer and generator have GPUs.
        dtype: the dtype of the weights in the processes of a generator.
        weights: the bytes of the weights in one process of a generator.
    """

    def __init__(self, trainer: Trainer, local: int) -> None:
        generator, lag = trainer.cfg.generator, trainer.cfg.schedule.max_lag
        self.trainer, self.local = trainer, local
        self.generators = local if generator.on_each_rank(lag) else 1
        self.each = generator.processes(lag)
        self.annotates = generator.annotates(lag, trainer.ranks, on_gpu=trainer.device == "cuda")
        self.route = generator.route(gpus=True)
        self.dtype = generator.weights_dtype(trainer.cfg.model.dtype)
        self.weights = (4 if self.dtype == "float32" else 2) * trainer.policy.parameters

    def in_ram(self, ram: int) -> Iterator[Part]:
        """Yield the parts of a generator and its annotator on a host without GPUs, which has `ram` bytes."""
        if not self.each:
            return
        yield self.in_transfer()
        process = [Part("generator's process", PROCESS, LIBRARIES)]
        if reserved := self.trainer.cfg.generator.reserves(on_gpu=False):
            cache = f"{reserved.share:g} of RAM (generator.memory)"
            process.append(Part(f"{reserved.engine}: weights", self.weights, self.dtype))
            process.append(Part(f"{reserved.engine}: keys and values", reserved.share * ram, cache))
        else:
            process += self._copy_that_decodes()
        yield from (part.times(self.each) for part in process)
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
        made_of = f"{tokens}; {engine} uses the rest of its share for more"
        yield Part(f"{engine}: keys and values", policy.cache(tokens.length, precision.cache), made_of)
        if self.trainer.cfg.generator.shares_gpu:
            working = working_memory(
                hidden=policy.hidden,
                intermediate=policy.intermediate,
                vocabulary=policy.vocabulary,
                number_bytes=precision.product,
                sequences=reserved.sequences,
            )
            yield Part(f"{engine}: working memory", working, "activations, CUDA graphs, choice of tokens")
        yield from nccl(int(reserved.gpus > 1) + int(self.route is Transfer.nccl))

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
        return {gpu: [part.times(n) for part, n in Counter(parts).items()] for gpu, parts in found.items()}

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
        trainer = self.trainer
        yield Part.of_parameters("generator: weights", trainer.policy.parameters, self.weights)
        sampling = trainer.sampling(trainer.cfg.generator.decodes)
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
                yield Part.of_parameters(f"annotator: {role}", count, count * footprint.weights)
