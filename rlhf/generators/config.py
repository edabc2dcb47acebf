"""Settings of the generators."""

from __future__ import annotations

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


@option("generator", "dataset")
@dataclass(kw_only=True, slots=True)
class DatasetConfig(GeneratorConfig):
    """Completions that a data set holds; nothing is sampled in training."""

    samples: ClassVar[bool] = False

    name: str = "dataset"
    temperature: float = 1.0  # of the log-probs
    path: str | None = (
        None  # rollouts of another run (its folder generations/); null: completions of the task
    )

    def build(self, cfg: Config, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Generator:
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
