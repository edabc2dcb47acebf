"""Settings of the generators."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.generators.vllm import VLLMFactory
    from rlhf.generators.worker import Limits


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Section):
    """What every generator has."""

    samples: ClassVar[bool] = True  # False: it only returns what is stored

    name: str = MISSING
    temperature: float = 0.7
    response_length: int = 53  # tokens; longer responses are cut there
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def rollouts(self) -> bool:
        """Whether what it returns was sampled, with the sampler's log-probs."""
        return self.samples

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Make the generator of the run in `folder` whose policy `engine` trains."""
        raise NotImplementedError

    def has_worker(self, cfg: Config) -> bool:
        """Whether it samples in a process of its own."""
        return False

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


@dataclass(kw_only=True, slots=True)
class WorkerConfig(GeneratorConfig):
    """What a generator has that samples in a process of its own."""

    threads: int | None = None  # CPU threads of that process; null: half of the cores, all where max_lag is 0
    start_limit_s: float = 300.0  # seconds until it must be ready
    request_limit_s: float = 1800.0  # seconds that a request may take; then the process counts as hung
    restarts: int = 3  # times in a session that a process which died or hung is replaced

    def has_worker(self, cfg: Config) -> bool:
        """Always, but where an option says otherwise."""
        return True

    def limits(self) -> Limits:
        """What the process may take."""
        from rlhf.generators.worker import Limits

        return Limits(self.start_limit_s, self.request_limit_s, self.restarts)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, limits out of bounds, and more threads than there are cores."""
        yield from GeneratorConfig.problems(self, cfg)
        for key, least, meaning, remedy in (
            ("threads", 1, "CPU threads of the generator's process; null: its share of the cores", "null"),
            ("start_limit_s", 1, "seconds until the generator's process must be ready", 300),
            ("request_limit_s", 1, "seconds that a request may take", 1800),
            ("restarts", 0, "times that a lost process is replaced", 3),
        ):
            value = getattr(self, key)
            if value is not None and not value >= least:
                yield (
                    f"generator.{key} must be >= {least} ({meaning}), got {value}; "
                    f"set generator.{key}={remedy}"
                )
        trainer, own = (count or 0 for count in threads(cfg))
        cores = cpu_cores()
        typed = [key for key in ("generator", "backend") if getattr(cfg, key).threads]
        if self.has_worker(cfg) and cfg.schedule.max_lag > 0 and typed and trainer + own > max(cores, 2):
            yield (
                "backend.threads + generator.threads must be <= the cores of this machine (trainer and "
                f"generator work at the same time), got {trainer} + {own} on {cores} cores; "
                f"set {typed[0]}.threads=null"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Threads of a process that there is not."""
        yield from GeneratorConfig.warnings(self, cfg)
        if self.threads is not None and not self.has_worker(cfg):
            yield (
                f"generator.threads={self.threads} has no effect without a process of its own "
                "(generator.worker=true, or schedule.max_lag above 0)"
            )


def cpu_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(cfg: Config) -> tuple[int | None, int | None]:
    """CPU threads of the trainer and of the generator's process; None: as torch has it.

    They share the cores (OMP_NUM_THREADS where that is set), half each where the config does not say, if they
    work at the same time; with `max_lag` 0 they take turns, and each has all.
    """
    trainer, generator = cfg.backend.threads, cfg.generator
    if not isinstance(generator, WorkerConfig) or not generator.has_worker(cfg):
        return trainer, None
    own, chosen = generator.threads, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = int(chosen) if chosen.isdigit() else cpu_cores()
    if cfg.schedule.max_lag == 0:
        return trainer, own or cores
    if own is None:
        own = max(1, cores - trainer if trainer else cores // 2)
    return trainer or max(1, cores - own), own


@option("generator", "hf")
@dataclass(kw_only=True, slots=True)
class HFConfig(WorkerConfig):
    """Sampling with the Hugging Face model that is trained, or with a copy of it in a process of its own."""

    name: str = "hf"
    batch_size: int = 256  # sequences decoded at once
    worker: bool | None = None  # a process of its own; null: where schedule.max_lag is above 0

    def has_worker(self, cfg: Config) -> bool:
        """As `generator.worker` says."""
        return cfg.schedule.max_lag > 0 if self.worker is None else self.worker

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Sample with the engine's policy, or with a copy of it."""
        from rlhf.generators.hf import HFGenerator, HFSamplerFactory

        if not self.has_worker(cfg):
            return HFGenerator(engine.borrow_policy, tokenizer, self.batch_size, cfg.seed)
        from rlhf.generators.worker import WorkerGenerator, environment

        model = engine.policy.model
        factory = HFSamplerFactory(
            config=model.config.to_json_string(use_diff=False),
            attention=cfg.model.attention,
            remote=model.config.name_or_path if cfg.model.trust_remote_code else None,
            device=model.device.type,
            dtype=cfg.model.dtype,
            stop_ids=[tokenizer.eos_token_id],
            pad_id=tokenizer.pad_token_id,
            batch_size=self.batch_size,
            seed=cfg.seed,
        )
        log = folder / "generator.log"
        variables = environment(threads(cfg)[1], model.device)
        return WorkerGenerator(factory, log, variables, self.limits(), cfg.schedule.in_flight)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and the size of a decoding batch."""
        yield from WorkerConfig.problems(self, cfg)
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
class VLLMConfig(WorkerConfig):
    """Sampling with vLLM, in a process of its own; with GPUs, on GPUs of its own."""

    on_gpu: ClassVar[float] = 0.9  # `memory` there, where it is null
    shares_gpu: ClassVar[bool] = False  # with the trainer

    name: str = "vllm"
    memory: float | None = None  # share of the GPU's; without GPUs of RAM, for keys and values; null is 0.1
    max_num_seqs: int = 256  # sequences decoded at once
    dtype: Precision | None = None  # null: model.dtype
    enforce_eager: bool | None = None  # do not compile; null: only on GPUs
    tensor_parallel_size: int = 1  # GPUs that share the model
    devices: list[int] | None = None  # GPUs, by number; null: those after the trainer's

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Sample with vLLM, which starts from the config of the policy and gets its weights with `load`."""
        import torch

        from rlhf.console import say
        from rlhf.generators.vllm import place, visible
        from rlhf.generators.worker import WorkerGenerator, environment

        devices = place(self, torch.cuda.device_count())
        variables = environment(threads(cfg)[1], torch.device("cpu"))
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        elif self.shares_gpu:
            say(f"generator={self.name} gives no memory back while it waits: on a CPU vLLM cannot sleep")
        factory = self.factory(cfg, tokenizer, bool(devices))
        log = folder / "generator.log"
        return WorkerGenerator(factory, log, variables, self.limits(), cfg.schedule.in_flight)

    def factory(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, gpu: bool) -> VLLMFactory:
        """What the process of vLLM is started with, for the policy of the run `cfg`."""
        from rlhf.generators.vllm import VLLMFactory

        assert cfg.model.policy is not None, "validated: a policy is named or made"
        return VLLMFactory(
            model=cfg.model.policy,
            trust_remote_code=cfg.model.trust_remote_code,
            dtype=(self.dtype or cfg.model.dtype).value,
            max_model_len=cfg.task.max_prompt_tokens + self.response_length,
            max_num_seqs=self.max_num_seqs,
            memory=self.memory or (self.on_gpu if gpu else 0.1),
            enforce_eager=not gpu if self.enforce_eager is None else self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu=gpu,
            sleeps=self.shares_gpu and gpu,
            in_flight=cfg.schedule.in_flight,
            stop_ids=(tokenizer.eos_token_id,),
            pad_id=tokenizer.pad_token_id,
            seed=cfg.seed,
        )

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, vLLM itself, and what it cannot be set to."""
        yield from WorkerConfig.problems(self, cfg)
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
    path: str | None = None  # saved rollouts (generations/ of a run); null: completions of the task

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Return what the task stores, or what a run saved."""
        from rlhf.generators.dataset import DatasetGenerator, ReplayGenerator

        if self.path is None:
            return DatasetGenerator(tokenizer)
        return ReplayGenerator(Path(self.path).expanduser(), tokenizer, self.temperature)

    @property
    def rollouts(self) -> bool:
        """Whether what is stored was sampled, with the sampler's log-probs."""
        return self.path is not None

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and saved rollouts that are not there or too few."""
        yield from GeneratorConfig.problems(self, cfg)
        if self.path is None:
            return
        folder = Path(self.path).expanduser()
        count = len(list(folder.glob("[0-9]*.parquet"))) if folder.is_dir() else 0
        if not count:
            yield (
                "generator.path must be a folder of saved rollouts (save_generations=true writes one to the "
                f"run folder), got {self.path}; set generator.path=<run folder>/generations"
            )
        elif cfg.schedule.total_episodes is not None and cfg.num_updates() > count:
            most = count * cfg.episodes_per_update
            yield (
                f"schedule.total_episodes must be <= {most} (generator.path has rollouts of {count} "
                f"updates), got {cfg.schedule.total_episodes}; set schedule.total_episodes={most}"
            )
        if cfg.algo.supervised:
            yield (
                f"generator.path must be null for algo={cfg.algo.name} (it trains on completions of the "
                f"task), got {self.path}; set generator.path=null"
            )
