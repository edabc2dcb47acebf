"""Settings of the generators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config import Config
    from rlhf.engines.engine import Engine
    from rlhf.generators.generator import Generator
    from rlhf.generators.worker import Limits


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
        return WorkerGenerator(factory, log, environment(threads(cfg)[1], model.device), self.limits())

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and the size of a decoding batch."""
        yield from WorkerConfig.problems(self, cfg)
        if self.batch_size < 1:
            yield (
                f"generator.batch_size must be >= 1 (sequences decoded at once), got {self.batch_size}; "
                "set generator.batch_size=256"
            )


@option("generator", "dataset")
@dataclass(kw_only=True, slots=True)
class DatasetConfig(GeneratorConfig):
    """Completions that a data set holds; nothing is sampled in training."""

    samples: ClassVar[bool] = False

    name: str = "dataset"
    temperature: float = 1.0  # of the log-probs

    def build(
        self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> Generator:
        """Return what the task stores."""
        from rlhf.generators.dataset import DatasetGenerator

        return DatasetGenerator(tokenizer)
