"""Sections of the loggers. `logger=[wandb,tensorboard]` turns on both; metrics.jsonl is always written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from rlhf.config.schema import Section, option


class WandbMode(StrEnum):
    """Where Weights & Biases sends a run. `offline` writes to the run folder, for a later `wandb sync`."""

    online = "online"
    offline = "offline"


@option("logger", "wandb", part="rlhf.loggers.wandb:WandbLogger")
@dataclass(kw_only=True, slots=True)
class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "rlhf"  # project at W&B
    entity: str | None = None  # user or team at W&B; null: the default of the account
    group: str | None = None  # groups runs in the W&B interface
    tags: list[str] | None = None  # labels of the run at W&B
    mode: WandbMode | None = None  # null: the value of the variable WANDB_MODE, online if that is not set

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if the package wandb is missing."""
        yield from missing_package("wandb")


@option("logger", "tensorboard", part="rlhf.loggers.tensorboard:TensorboardLogger")
@dataclass(kw_only=True, slots=True)
class TensorboardConfig(Section):
    """TensorBoard event files in `tensorboard/` of the run folder."""

    flush_secs: int = 30  # seconds until buffered rows are written to disk

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if the package tensorboard is missing."""
        yield from missing_package("tensorboard")


@option("logger", "jsonl")
@dataclass(kw_only=True, slots=True)
class LoggersConfig(Section):
    """The loggers that a run uses in addition to metrics.jsonl; null turns a logger off."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None


def missing_package(package: str) -> Iterator[str]:
    """Yield an error if the optional dependency `package` is not installed."""
    if find_spec(package) is None:
        yield (
            f"logger={package} needs the package {package}, which is not installed; "
            f"run: pip install -e '.[{package}]', or leave logger={package} out"
        )
