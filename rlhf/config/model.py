"""Sections of the models: hub models, the embedded model, LoRA."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from omegaconf import MISSING

from rlhf.config.backend import Device
from rlhf.config.schema import Section, option

if TYPE_CHECKING:
    from rlhf.config.root import Config


class Dtype(Enum):
    """What forwards compute in. Weights that are trained stay float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # with the loss scaled, so that small gradients are not 0; GPUs only


@dataclass(kw_only=True, slots=True)
class LoRAConfig(Section):
    """Low-rank adapters, trained in place of the weights (Hu et al., arXiv 2106.09685)."""

    rank: int = 0  # of the update of a layer; 0: all weights are trained
    alpha: int = 32  # the update is multiplied by alpha / rank
    targets: list[str] | None = None  # linear layers, by the ends of their names; null: all below the head
    modules_to_save: list[str] = field(default_factory=list)  # modules trained whole, by the ends of names

    def problems(self, cfg: Config) -> Iterator[str]:
        """Numbers out of bounds, a missing library, and a base that nothing keeps."""
        if self.rank < 0:
            yield (
                "model.lora.rank must be >= 0 (the rank of a layer's update; 0: no adapters), "
                f"got {self.rank}; set model.lora.rank=16"
            )
        if self.rank < 1:
            return
        if importlib.util.find_spec("peft") is None:
            yield (
                f"model.lora.rank needs PEFT (it makes the adapters), not installed here, got {self.rank}; "
                "pip install 'rlhf[lora]', or set model.lora.rank=0"
            )
        if self.alpha < 1:
            yield (
                "model.lora.alpha must be >= 1 (the update is multiplied by alpha / rank), "
                f"got {self.alpha}; set model.lora.alpha=32"
            )
        if self.targets == []:
            yield (
                "model.lora.targets must name a layer (nothing would be trained), got []; "
                "set model.lora.targets=null"
            )
        if cfg.algo.trains.name == "base" and cfg.model.base is None:
            yield (
                f"model.lora.rank must be 0 for algo={cfg.algo.name} without model.base (adapters need a "
                f"model that is there already), got {self.rank}; set model.lora.rank=0"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Settings of adapters that there are not."""
        if self.rank == 0:
            for key, off in (("alpha", 32), ("targets", None), ("modules_to_save", [])):
                if getattr(self, key) != off:
                    yield f"model.lora.{key} has no effect with model.lora.rank=0 (no adapters)"


@option("model", "hub")
@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The models of a run, each a hub name or a local folder."""

    name: str = MISSING
    base: str | None = None  # where sft starts
    policy: str | None = None  # where rl and reward modelling start; null: made by sft (embedded tasks)
    reference: str | None = None  # null: the policy as it starts
    reward: str | None = None  # what scorer=reward_model reads; null: made by algo=reward (embedded tasks)
    tokenizer: str | None = None  # null: the one beside the policy (the base, for sft)
    pad_token: str | None = None  # for tokenizers without one of their own
    dtype: Dtype = Dtype.float32
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    gradient_checkpointing: bool = False  # keep the inputs of blocks alone, and compute the rest again
    shared_prefix: bool = True  # encode a prompt once for its K responses
    attention: str = "sdpa"  # attention implementation of transformers
    trust_remote_code: bool = False

    @property
    def starts_as_reference(self) -> bool:
        """Whether the reference is the policy as it starts."""
        return self.reference in (None, self.policy)

    def problems(self, cfg: Config) -> Iterator[str]:
        """A type that the device or backend does not train in; a model that is neither named nor makeable."""
        if self.dtype is Dtype.float16 and cfg.backend.device is Device.cpu:
            yield float16_needs_gpu("backend.device=cpu")
        if self.dtype is Dtype.float16 and not cfg.backend.scales_loss:
            yield (
                f"model.dtype must be float32 or bfloat16 with backend={cfg.backend.name} (it does not scale "
                "the loss, without which small gradients are 0), got float16; set model.dtype=bfloat16"
            )
        if cfg.makes_models:
            return
        wanted = {"base": self.base} if cfg.algo.trains.name == "base" else {"policy": self.policy}
        if cfg.scorer.reads_reward and not cfg.algo.supervised:
            wanted["reward"] = self.reward
        for key, value in wanted.items():
            if value is None:
                yield (
                    f"model.{key} must name a model for task={cfg.task.name} (only embedded tasks make their "
                    f"own), got null; set model.{key}=<hub name or folder>"
                )


def float16_needs_gpu(found: str) -> str:
    """The error for float16 on a CPU."""
    return (
        f"model.dtype must be float32 or bfloat16 without a GPU ({found}; CPUs do not train in float16), got "
        "float16; set model.dtype=bfloat16"
    )


@option("model", "nano")
@dataclass(kw_only=True, slots=True)
class NanoConfig(ModelConfig):
    """A GPT-NeoX (Pythia) small enough for a laptop's CPU, made from nothing where `base` is null."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 512  # positions

    def problems(self, cfg: Config) -> Iterator[str]:
        """Heads that do not divide the width."""
        yield from ModelConfig.problems(self, cfg)
        if self.heads < 1 or self.hidden_size % self.heads:
            yield (
                f"model.hidden_size must be divisible by model.heads (each head has an equal part), "
                f"got {self.hidden_size} and {self.heads}; set model.heads=4"
            )
