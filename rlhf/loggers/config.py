"""Settings of the loggers. Several may be on at once: `logger=[wandb,tensorboard]`; metrics.jsonl is always written."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.schema import Section, option


@dataclass(kw_only=True, slots=True)
class WandbConfig(Section):
    """Weights & Biases. `mode=offline` writes to the run folder, to be synchronised later."""

    project: str = "rlhf"
    entity: str | None = None
    mode: str = "online"


@dataclass(kw_only=True, slots=True)
class TensorboardConfig(Section):
    """Event files under `tensorboard/` of the run folder."""

    flush_secs: int = 30


@option("logger", "jsonl")
@dataclass(kw_only=True, slots=True)
class LoggersConfig(Section):
    """Which loggers are on beside metrics.jsonl; null is off."""

    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
