"""Memory of the trainer, by phase of an update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.generator import HFConfig, WorkerConfig
from rlhf.config.model import Dtype
from rlhf.memory import activations
from rlhf.memory.activations import AUTOCAST, BFLOAT16, FLOAT32, Tokens
from rlhf.memory.uses import PROCESS, Part, Phase, in_words, parameters
from rlhf.models import sharing_rules as sharing

if TYPE_CHECKING:
    from rlhf.config.footprint import Footprint
    from rlhf.config.root import Config
    from rlhf.memory.activations import Precision
    from rlhf.memory.loaded_models import Model
    from rlhf.memory.model_size import ModelSize


@dataclass(frozen=True, slots=True)
class Trainer:
    """What one rank of the trainer needs on its device, `cpu` or `cuda`."""

    cfg: Config
    models: tuple[Model, ...]
    ranks: int
    device: str

    @property
    def policy(self) -> ModelSize:
        """The size of what is sampled from, or trained where nothing is."""
        return self.models[0].counted

    @property
    def eager(self) -> bool:
        """Whether attention keeps its probabilities."""
        return self.cfg.model.attention == "eager"

    def precision(self, trained: bool) -> Precision:
        """Of a model that is trained, or of a frozen one."""
        if self.cfg.model.dtype is Dtype.float32:
            return FLOAT32
        return AUTOCAST if trained and not self.cfg.model.lora.rank else BFLOAT16

    def tokens(self, sequences: int, samples: int) -> Tokens:
        """A forward of at most so many sequences (one prompt's at least), as long as the config allows."""
        cfg = self.cfg
        share = -(-cfg.schedule.prompts_per_update // self.ranks)
        prompts = max(1, min(sequences // samples, share))
        return Tokens(
            prompts=prompts,
            samples=samples,
            prompt=cfg.task.max_prompt_tokens,
            response=cfg.generator.response_length,
            apart=cfg.model.shared_prefix and self.prompt_apart(prompts, samples),
        )

    @property
    def gathers(self) -> bool:
        """Whether weights are divided over ranks, which then go through forwards together."""
        return self.cfg.backend.footprint().gathered

    def prompt_apart(self, prompts: int, samples: int) -> bool:
        """Whether prompts of full length are encoded in a pass of their own."""
        return sharing.prompt_apart(
            samples,
            prompts * self.cfg.task.max_prompt_tokens,
            layers=self.policy.layers,
            hidden=self.policy.hidden,
            gpu=self.device == "cuda",
            whole=self.gathers,
        )

    def encoded(self, tokens: Tokens) -> Iterator[Tokens]:
        """`tokens` and, where shorter prompts would not have a pass of their own, the longest of those."""
        yield tokens
        if tokens.apart and self.device == "cuda" and not self.gathers:
            shorter = sharing.spared_from(tokens.samples, self.policy.hidden) / tokens.prompts
            yield replace(tokens, prompt=max(1, int(shorter)), apart=False)

    def weights(self, model: Model) -> tuple[int, Footprint]:
        """How many weights are held as they are, and how: frozen ones in `model.dtype`."""
        footprint, count = self.cfg.backend.footprint(), model.counted.parameters
        if model.trained and model.adapters is None:
            return count, footprint
        return count, replace(footprint, weights=self.precision(False).residual)

    def parts(self) -> Iterator[Part]:
        """Weights, adapters and optimizer states on the device."""
        footprint = self.cfg.backend.footprint()
        if self.device == "cpu":
            yield Part("process", PROCESS, "Python, torch, libraries")
        for model in self.models:
            count, held_as = self.weights(model)
            held = held_as.on_device("weights", count, self.ranks)
            yield Part(f"{model.role}: weights", held, parameters(count, held))
            if model.adapters is not None:
                held = footprint.on_device("weights", model.adapters, self.ranks)
                yield Part(f"{model.role}: adapters", held, parameters(model.adapters, held))
            if model.trained:
                held = footprint.on_device("optimizer", model.trainable, self.ranks)
                yield Part(f"{model.role}: optimizer", held, parameters(model.trainable, held))

    def in_ram(self) -> Iterator[Part]:
        """What the backend offloads."""
        footprint = self.cfg.backend.footprint()
        for model in self.models:
            count, held_as = self.weights(model)
            held = held_as.in_ram("weights", count, self.ranks)
            if model.adapters is not None:
                held += footprint.in_ram("weights", model.adapters, self.ranks)
            for kind in ("gradients", "optimizer"):
                held += footprint.in_ram(kind, model.trainable, self.ranks)
            yield Part(f"{model.role}: offloaded", held, parameters(count, held))

    def loading(self) -> Part:
        """All models, before they go to the GPU."""
        each = (count * held_as.weights for count, held_as in map(self.weights, self.models))
        return Part("models", sum(each), "before they go to the GPU")

    def gradients(self) -> Iterator[Part]:
        """Of what is trained, on the device; and a layer whose weights are brought together."""
        footprint = self.cfg.backend.footprint()
        for model in self.models:
            if model.trained:
                held = footprint.on_device("gradients", model.trainable, self.ranks)
                yield Part(f"{model.role}: gradients", held, parameters(model.trainable, held))
                if footprint.gathered:
                    size, held_as = model.counted, self.weights(model)[1]
                    layer = max(size.backbone // max(1, size.layers), size.vocabulary * size.hidden)
                    gradients = footprint.gradients if model.adapters is None else 0
                    yield Part(
                        f"{model.role}: one layer", layer * (held_as.weights + gradients), "from all ranks"
                    )

    def phases(self) -> Iterator[Phase]:
        """Training, the optimizer step, log-probs and scores, sampling in this process."""
        cfg, gradients = self.cfg, tuple(self.gradients())
        samples = cfg.algo.samples_per_prompt
        trained = cfg.algo.keeps or samples
        tokens = self.tokens(min(cfg.backend.micro_batch, minibatch(cfg, self.ranks)), trained)
        yield Phase(
            "training",
            (
                *gradients,
                *(
                    Part(
                        f"{model.role}: activations",
                        max(
                            activations.training(
                                model.counted,
                                each,
                                self.precision(True),
                                eager=self.eager,
                                device=self.device,
                                checkpointing=cfg.model.gradient_checkpointing,
                            )
                            for each in self.encoded(tokens)
                        ),
                        in_words(tokens),
                        estimated=True,
                    )
                    for model in self.models
                    if model.trained
                ),
            ),
        )
        footprint = cfg.backend.footprint()
        if self.device == "cuda" and "optimizer" not in footprint.offloaded:
            count = sum(model.trainable for model in self.models)
            held = footprint.step * count / (self.ranks if "optimizer" in footprint.sharded else 1)
            yield Phase("optimizer step", (*gradients, Part("updates", held, parameters(count, held))))
        reads = [
            Part(
                model.role,
                max(
                    activations.inference(
                        model.counted,
                        each,
                        self.precision(model.trained),
                        eager=self.eager,
                        device=self.device,
                    )
                    for each in self.encoded(asked)
                ),
                in_words(asked),
                estimated=True,
            )
            for model in self.models
            for asked in (self.tokens(model.batch_size, samples), self.tokens(model.batch_size, 1))
        ]
        yield Phase("log-probs and scores", (max(reads, key=lambda part: part.bytes),))
        if cfg.algo.trains is not Trains.reward and not isinstance(cfg.generator, WorkerConfig):
            yield Phase("sampling", (self.sampling(cfg.eval.batch_size, self.precision(True)),))
        elif isinstance(cfg.generator, HFConfig) and not cfg.has_worker:
            yield Phase("sampling", (self.sampling(cfg.generator.batch_size, self.precision(True)),))

    def sampling(self, batch_size: int, precision: Precision) -> Part:
        """What decoding takes beside the weights, in training or for an evaluation."""
        cfg = self.cfg
        asked = [self.tokens(batch_size, cfg.algo.samples_per_prompt)] if cfg.generator.samples else []
        if cfg.schedule.eval_every:
            alone = self.tokens(batch_size, 1)
            asked.append(replace(alone, prompts=min(batch_size, cfg.eval.prompts)))
        parts = [
            Part(
                "keys, values, choice",
                activations.sampling(self.policy, tokens, precision, eager=self.eager, device=self.device),
                in_words(tokens),
                estimated=True,
            )
            for tokens in asked
        ]
        return max(parts, key=lambda part: part.bytes, default=Part("nothing", 0))


def minibatch(cfg: Config, ranks: int) -> int:
    """Sequences of an optimizer step on one rank."""
    prompts = cfg.schedule.prompts_per_update // max(1, cfg.schedule.minibatches)
    return -(-prompts // ranks) * (cfg.algo.keeps or cfg.algo.samples_per_prompt)
