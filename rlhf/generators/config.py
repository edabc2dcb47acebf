"""Settings of the generators."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.generators.vllm import VLLMFactory


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Section):
    """What every generator has."""

    samples: ClassVar[bool] = True  # False: it only returns stored completions

    name: str = MISSING
    temperature: float = 0.7
    response_length: int = 53  # tokens; longer responses are cut there
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def build(self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Generator:
        """Make the generator of the run whose policy `engine` trains."""
        raise NotImplementedError

    def problems(self, cfg: Config) -> Iterator[str]:
        """Settings of the sampler that training cannot use."""
        if self.response_length < 1:
            yield (
                "generator.response_length must be >= 1 (tokens of a response), "
                f"got {self.response_length}; set generator.response_length=53"
            )
        if self.temperature <= 0:
            yield (
                "generator.temperature must be > 0 (log-probs are those of logits / temperature), "
                f"got {self.temperature}; set generator.temperature=0.7"
            )
        for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self, key)
            if value != off:
                yield (
                    f"generator.{key} must be off for training (a truncated distribution is not the one that "
                    f"is trained, so its log-probs would be wrong), got {value}; set generator.{key}={off}"
                )


@option("generator", "hf")
@dataclass(kw_only=True, slots=True)
class HFConfig(GeneratorConfig):
    """Sampling with the trainer's own Hugging Face model, in its process."""

    name: str = "hf"
    batch_size: int = 256  # sequences decoded at once

    def build(self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Generator:
        """Sample with the engine's policy."""
        from rlhf.generators.hf import HFGenerator

        return HFGenerator(engine.borrow_policy, tokenizer, self.batch_size, cfg.seed)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and the size of a decoding batch."""
        yield from GeneratorConfig.problems(self, cfg)
        if self.batch_size < 1:
            yield (
                f"generator.batch_size must be >= 1 (sequences decoded at once), got {self.batch_size}; "
                "set generator.batch_size=256"
            )


class Precision(Enum):
    """What a generator computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@option("generator", "vllm")
@dataclass(kw_only=True, slots=True)
class VLLMConfig(GeneratorConfig):
    """Sampling with vLLM, in a process of its own; with GPUs, on GPUs of its own."""

    on_gpu: ClassVar[float] = 0.9  # `memory` there, where it is null
    shares_gpu: ClassVar[bool] = False  # with the trainer

    name: str = "vllm"
    memory: float | None = None  # share of the GPU's memory; without GPUs of RAM, and null is 0.2
    max_num_seqs: int = 256  # sequences decoded at once
    dtype: Precision | None = None  # null: model.dtype
    enforce_eager: bool | None = None  # do not compile; null: only on GPUs
    tensor_parallel_size: int = 1  # GPUs that share the model
    devices: list[int] | None = None  # GPUs, by number; null: those after the trainer's

    def factory(self, cfg: Config, tokenizer: PreTrainedTokenizerFast) -> VLLMFactory:
        """What the process of vLLM is started with, for the policy of the run `cfg`."""
        import torch

        from rlhf.generators.vllm import VLLMFactory, place

        assert cfg.model.policy is not None, "validated: a policy is named or made"
        devices = place(self, torch.cuda.device_count())
        return VLLMFactory(
            model=cfg.model.policy,
            trust_remote_code=cfg.model.trust_remote_code,
            dtype=(self.dtype or cfg.model.dtype).value,
            max_model_len=cfg.task.max_prompt_tokens + self.response_length,
            max_num_seqs=self.max_num_seqs,
            memory=self.memory or (self.on_gpu if devices else 0.2),
            enforce_eager=not devices if self.enforce_eager is None else self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            devices=devices,
            threads=torch.get_num_threads(),
            sleeps=self.shares_gpu,
            stop_ids=(tokenizer.eos_token_id,),
            pad_id=tokenizer.pad_token_id,
            seed=cfg.seed,
        )

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, vLLM itself, and what it cannot be set to."""
        yield from GeneratorConfig.problems(self, cfg)
        if importlib.util.find_spec("vllm") is None:
            yield (
                f"generator={self.name} needs vLLM (it samples), which is not installed here; "
                "pip install 'rlhf[vllm]', or set generator=hf"
            )
        for key, value, remedy in (
            ("generator.temperature", self.temperature, 0.7),
            ("eval.temperature", cfg.eval.temperature, 0.01),
        ):
            if 0 < value < 0.01:
                yield (
                    f"{key} must be >= 0.01 with generator={self.name} (vLLM raises lower ones to that), "
                    f"got {value}; set {key}={remedy}"
                )
        if self.memory is not None and not 0 < self.memory <= 1:
            yield (
                "generator.memory must be > 0 and <= 1 (a share of the device's memory), "
                f"got {self.memory}; set generator.memory=null"
            )
        if self.max_num_seqs < 1:
            yield (
                f"generator.max_num_seqs must be >= 1 (sequences decoded at once), got {self.max_num_seqs}; "
                "set generator.max_num_seqs=256"
            )
        if self.tensor_parallel_size < 1:
            yield (
                "generator.tensor_parallel_size must be >= 1 (GPUs that share the model), "
                f"got {self.tensor_parallel_size}; set generator.tensor_parallel_size=1"
            )
        elif self.devices is not None and (
            len(set(self.devices)) != self.tensor_parallel_size or min(self.devices) < 0
        ):
            yield (
                "generator.devices must name as many GPUs as generator.tensor_parallel_size says "
                f"({self.tensor_parallel_size}, each by its number), got {self.devices}; "
                "set generator.devices=null"
            )


@option("generator", "vllm_colocated")
@dataclass(kw_only=True, slots=True)
class VLLMColocatedConfig(VLLMConfig):
    """Sampling with vLLM on the trainer's GPU, in a process that gives the memory back while it trains."""

    on_gpu: ClassVar[float] = 0.45
    shares_gpu: ClassVar[bool] = True

    name: str = "vllm_colocated"

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and requests while training."""
        yield from VLLMConfig.problems(self, cfg)
        if cfg.schedule.max_lag > 0:
            yield (
                "schedule.max_lag must be 0 with generator=vllm_colocated (it sleeps while the trainer has "
                f"the device), got {cfg.schedule.max_lag}; set generator=vllm"
            )


@option("generator", "dataset")
@dataclass(kw_only=True, slots=True)
class DatasetConfig(GeneratorConfig):
    """Completions that a data set holds; nothing is sampled in training."""

    samples: ClassVar[bool] = False

    name: str = "dataset"
    temperature: float = 1.0  # of the log-probs

    def build(self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Generator:
        """Return what the task stores."""
        from rlhf.generators.dataset import DatasetGenerator

        return DatasetGenerator(tokenizer)
