"""Memory of one rank of the trainer: permanent parts, and the phases of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.config.algorithms import Trains
from rlhf.config.models import Dtype
from rlhf.config.schedule import Optimizer
from rlhf.memory import uses
from rlhf.memory.sizes import adapter_parameters, linear_shapes, matrix_parameters, with_gradient
from rlhf.memory.uses import (
    AUTOCAST,
    BFLOAT16,
    FLOAT32,
    LIBRARIES,
    PROCESS,
    UNRELEASED,
    Part,
    Phase,
    Tokens,
    parameters,
)
from rlhf.models import folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.config.backends import Footprint
    from rlhf.config.root import Config
    from rlhf.memory.sizes import Model, ModelSize
    from rlhf.memory.uses import Precision


_BLOCK = 256  # elements of a moment that have a common float32 scale
EIGHT_BIT = 2 * (1 + 4 / _BLOCK)  # bytes per parameter of two moments of 8 bits
_MOMENTUM = 4  # bytes per parameter of Muon's state
_ITERATION = 10  # bytes per element of a matrix during Muon's step: a float32 update, three bfloat16 copies


def _updated_by_muon(cfg: Config, model: Model) -> int:
    """Return the number of parameters of a model that Muon updates."""
    if cfg.optim.optimizer is not Optimizer.muon or not model.trained:
        return 0
    if model.adapters is None:
        return min(matrix_parameters(model.counted), model.trainable)
    return adapter_parameters(model.counted, cfg.model.lora.rank, cfg.model.lora.targets)


def _optimizer_bytes(footprint: Footprint, cfg: Config, model: Model) -> float:
    """Return the bytes of optimizer state per trained parameter; `footprint` has those of AdamW."""
    if cfg.optim.optimizer is Optimizer.adamw_8bit:
        return EIGHT_BIT
    share = _updated_by_muon(cfg, model) / max(1, model.trainable)
    return _MOMENTUM * share + footprint.optimizer * (1 - share)


def _step_bytes(footprint: Footprint, cfg: Config, models: Sequence[Model]) -> float:
    """Return the bytes on one GPU of temporary tensors of a step, without division over ranks.

    Muon updates one matrix after the other. The kernel of AdamW with 8-bit moments has no such tensors.
    """
    if cfg.optim.optimizer is Optimizer.adamw_8bit:
        return 0
    matrix = 0
    if cfg.optim.optimizer is Optimizer.muon:
        shapes = (linear_shapes(model.counted).values() for model in models if model.trained)
        matrix = max(inputs * outputs for each in shapes for inputs, outputs in each)
    count = sum(model.trainable - _updated_by_muon(cfg, model) for model in models)
    return footprint.step * count + _ITERATION * matrix


@dataclass(frozen=True, slots=True)
class Trainer:
    """The memory that one rank of the trainer needs."""

    cfg: Config
    models: tuple[Model, ...]  # trained models first
    ranks: int
    device: str  # "cpu" or "cuda"

    @property
    def policy(self) -> ModelSize:
        """The size of the first model: the policy, or the reward model of `algo=reward`."""
        return self.models[0].counted

    @property
    def eager(self) -> bool:
        """Whether attention computes and keeps a matrix of probabilities."""
        return self.cfg.model.attention == "eager"

    def precision(self, trained: bool) -> Precision:
        """Return the bytes per number of the forward pass of a trained or of a frozen model."""
        if self.cfg.model.dtype is Dtype.float32:
            return FLOAT32
        return AUTOCAST if trained and not self.cfg.model.lora.rank else BFLOAT16

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

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded or offloaded, so that all ranks run every forward pass together."""
        return self.cfg.backend.footprint().gathered

    @property
    def only_first_loads(self) -> bool:
        """Whether only rank 0 of the run loads models, and the other ranks get placeholders.

        The rule is that of `rlhf.assembly.models.loaded`.
        """
        return self.gathers and self.ranks > 1 and not self.cfg.model.trust_remote_code

    def encoded(self, tokens: Tokens) -> Iterator[Tokens]:
        """Yield `tokens` and, on a GPU, tokens with the longest prompts that have no separate pass.

        Shorter prompts without a separate pass may need more memory than longer prompts with a separate pass.
        """
        yield tokens
        if tokens.apart and self.device == "cuda" and not self.gathers:
            shorter = folder.prompt_pass_pays_from(tokens.samples, self.policy.hidden) / tokens.prompts
            yield replace(tokens, prompt=max(1, int(shorter)), apart=False)

    def weights(self, model: Model) -> tuple[int, Footprint]:
        """Return the number of parameters of a model without its adapters, and their footprint.

        Frozen weights are stored in `model.dtype`.
        """
        footprint, count = self.cfg.backend.footprint(), model.counted.parameters
        if model.trained and model.adapters is None:
            return count, footprint
        return count, replace(footprint, weights=self.precision(False).residual)

    def stored(self) -> Iterator[tuple[Model, str, str, int, Footprint]]:
        """Yield everything that is stored of the models during the whole run.

        Yields:
            The model, the name of the part, its kind in a footprint, its number of parameters, its footprint.
        """
        footprint = self.cfg.backend.footprint()
        for model in self.models:
            count, weights = self.weights(model)
            yield model, "weights", "weights", count, weights
            if model.adapters is not None:
                yield model, "adapters", "weights", model.adapters, footprint
            if model.trained:
                states = replace(footprint, optimizer=_optimizer_bytes(footprint, self.cfg, model))
                yield model, "optimizer", "optimizer", model.trainable, states
                yield model, "gradients", "gradients", model.trainable, footprint

    def parts(self) -> Iterator[Part]:
        """Yield the permanent parts on the device: weights, adapters, optimizer states."""
        if self.device == "cpu":
            yield Part("process", PROCESS, LIBRARIES)
        for model, name, kind, count, footprint in self.stored():
            if kind != "gradients":
                size = footprint.on_device(kind, count, self.ranks)
                yield Part(f"{model.role}: {name}", size, parameters(count, size))

    def in_ram(self) -> Iterator[Part]:
        """Yield the parts that the backend offloads to RAM."""
        sizes: dict[str, float] = {}
        for model, _, kind, count, footprint in self.stored():
            size = footprint.in_ram(kind, count, self.ranks)
            sizes[model.role] = sizes.get(model.role, 0) + size
        for model in self.models:
            made_of = parameters(model.counted.parameters, sizes[model.role])
            yield Part(f"{model.role}: offloaded", sizes[model.role], made_of)

    def loading(self) -> Part:
        """Return the part of all models in the RAM of a rank that loads them, before they are on the GPU."""
        each = (count * stored.weights for count, stored in map(self.weights, self.models))
        return Part("models", sum(each), "before they are moved to the GPU")

    def gradients(self) -> Iterator[Part]:
        """Yield the gradients on the device and, with sharded weights, the largest gathered layer."""
        trained = 0
        for model, _, kind, count, footprint in self.stored():
            if kind != "gradients":
                continue
            trained += count
            size = footprint.on_device("gradients", count, self.ranks)
            yield Part(f"{model.role}: gradients", size, parameters(count, size))
            if footprint.gathered:
                counted, gradients = model.counted, footprint.gradients if model.adapters is None else 0
                block = counted.backbone // max(1, counted.layers)
                layer = max(block, counted.vocabulary * counted.hidden)
                each = self.weights(model)[1].weights + gradients
                yield Part(f"{model.role}: one layer", layer * each, "gathered from all ranks")
        yield from uses.bucket(self.cfg.backend.footprint(), trained, self.ranks)

    def phases(self) -> Iterator[Phase]:
        """Yield the phases: training, optimizer step, log-probs and scores, sampling in this process."""
        cfg, gradients = self.cfg, tuple(self.gradients())
        samples = cfg.algo.samples_per_prompt
        trained = [model for model in self.models if model.trained]
        tokens = self.tokens(min(with_gradient(cfg), minibatch(cfg, self.ranks)), cfg.algo.keeps or samples)
        activations = (self._activations(model, tokens, backward=True) for model in trained)
        yield Phase("training", (*gradients, *activations))
        footprint = cfg.backend.footprint()
        if self.device == "cuda" and "optimizer" not in footprint.offloaded:
            count = sum(model.trainable for model in trained)
            size = _step_bytes(footprint, cfg, trained)
            size /= self.ranks if "optimizer" in footprint.sharded else 1
            yield Phase("optimizer step", (*gradients, Part("updates", size, parameters(count, size))))
        reads = [
            self._activations(model, requested, backward=False)
            for model in self.models
            for requested in (self.tokens(model.batch_size, samples), self.tokens(model.batch_size, 1))
        ]
        yield Phase("log-probs and scores", (max(reads, key=lambda part: part.bytes),))
        copy = tuple(self.whole_copy())
        # Evaluations sample even if the generator does not.
        decodes = cfg.generator.decodes if cfg.generator.samples else cfg.eval.batch_size
        if cfg.algo.trains is Trains.reward or not decodes:
            return
        if not cfg.has_worker:
            yield Phase("sampling", (*copy, self.sampling(decodes, self.precision(True))))
        elif copy:  # `rlhf.trials.agreement.samples_with_cache`
            yield Phase("comparison of sampling", copy)

    def _activations(self, model: Model, tokens: Tokens, backward: bool) -> Part:
        how: dict[str, Any] = {"eager": self.eager, "device": self.device}
        estimate: Callable[..., float] = uses.inference
        if backward:
            estimate, how["checkpointing"] = uses.training, self.cfg.model.gradient_checkpointing
        precision = self.precision(model.trained)
        size = max(estimate(model.counted, each, precision, **how) for each in self.encoded(tokens))
        name = f"{model.role}: activations" if backward else model.role
        return Part(name, size, str(tokens), estimated=True)

    def unreleased(self) -> Iterator[Part]:
        """Yield the memory, besides the permanent parts, that the trainer keeps while vLLM uses its GPU.

        Before vLLM samples, the trainer returns segments of memory without any tensor to the GPU. Segments
        that contain both a permanent tensor and freed memory remain. ZeRO-3 keeps its gradients.
        """
        if self.cfg.backend.footprint().gathered:
            yield from (part for part in self.gradients() if part.name.endswith(": gradients"))
        largest = max(self.phases(), key=lambda phase: phase.bytes)
        made_of = f"{UNRELEASED:.0%} of the memory of {largest.name}"
        yield Part("trainer: memory torch cannot return", UNRELEASED * largest.bytes, made_of, estimated=True)

    def whole_copy(self) -> Iterator[Part]:
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
        yield Part("policy: whole copy", size, parameters(count, size))

    def sampling(self, batch_size: int, precision: Precision) -> Part:
        """Return the memory of decoding without the weights: the larger value of rollouts and evaluation.

        Args:
            batch_size: sequences decoded in parallel.
            precision: bytes per number.
        """
        cfg = self.cfg
        requests = [self.tokens(batch_size, cfg.algo.samples_per_prompt)] if cfg.generator.samples else []
        if cfg.schedule.eval_every:
            single = self.tokens(batch_size, 1)
            requests.append(replace(single, prompts=min(batch_size, cfg.eval.prompts)))
        how: dict[str, Any] = {"eager": self.eager, "device": self.device}
        sizes = {tokens: uses.sampling(self.policy, tokens, precision, **how) for tokens in requests}
        if not sizes:
            return Part("nothing", 0)
        largest = max(sizes, key=sizes.__getitem__)
        return Part("KV cache and logits", sizes[largest], str(largest), estimated=True)


def minibatch(cfg: Config, ranks: int) -> int:
    """Return the number of sequences of one optimizer step on one rank."""
    prompts = cfg.schedule.prompts_per_update // max(1, cfg.schedule.minibatches)
    return -(-prompts // ranks) * (cfg.algo.keeps or cfg.algo.samples_per_prompt)
