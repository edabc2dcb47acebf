"""Settings of the loggers. `logger=[wandb,tensorboard]` turns on both; metrics.jsonl is always written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlhf.config.schema import Section, option

if TYPE_CHECKING:
    from rlhf.config.root import Config


class WandbMode(StrEnum):
    """Where Weights & Biases sends a run. `offline` writes to the run folder, to be synchronised later."""

    online = "online"
    offline = "offline"


@option("logger", "wandb")
@dataclass(kw_only=True, slots=True)
class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "rlhf"
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    mode: WandbMode | None = None  # null: as the variable WANDB_MODE says, online where it says nothing

    def problems(self, cfg: Config) -> Iterator[str]:
        """The package is missing."""
        yield from not_installed("wandb")


@option("logger", "tensorboard")
@dataclass(kw_only=True, slots=True)
class TensorboardConfig(Section):
    """Event files under `tensorboard/` of the run folder."""

    flush_secs: int = 30

    def problems(self, cfg: Config) -> Iterator[str]:
        """The package is missing."""
        yield from not_installed("tensorboard")


@option("logger", "jsonl")
@dataclass(kw_only=True, slots=True)
class LoggersConfig(Section):
    """Which loggers are on beside metrics.jsonl; null is off."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None


def not_installed(package: str) -> Iterator[str]:
    """Yield a problem where `package`, an extra of this project, cannot be imported."""
    if find_spec(package) is None:
        yield (
            f"logger={package} needs the package {package} (an extra), which is not installed; "
            f"run: pip install 'rlhf[{package}]', or leave logger={package} out"
        )
