"""Sections of the schedule, the optimizer and evaluation during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from omegaconf import MISSING

from rlhf.config.schema import Section

if TYPE_CHECKING:
    from rlhf.config.root import Config


class Update(Enum):
    """When a generator takes new weights over."""

    between = "between"  # between requests, in the order in which they were made
    in_flight = "in_flight"  # at once, in the middle of a request too


class LRSchedule(Enum):
    """The course of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = MISSING
    schedule: LRSchedule = LRSchedule.linear
    warmup: float = 0.0  # optimizer steps; below 1: fraction of the run
    max_grad_norm: float | None = 1.0  # null: no clipping
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(Section):
    """How long, how much at once, how far off-policy.

    `eval_every`, `save_every`, `log_every` are in updates; below 1: a fraction of the run; 0: never.
    """

    total_episodes: int | None = None  # of the whole run
    total_epochs: float | None = None  # supervised only, instead of total_episodes
    prompts_per_update: int = MISSING  # N, over all ranks
    minibatches: int = 1  # optimizer steps in one pass over a rollout batch (the paper's N)
    epochs: int = 1  # passes over a rollout batch (the paper's T)
    max_lag: int = 0  # later requests in flight
    update: Update = Update.between  # when the generator takes new weights over
    eval_every: float = 0.2
    save_every: float = 0.25
    log_every: float = 1

    @property
    def in_flight(self) -> bool:
        """Whether weights change while requests are running."""
        return self.update is Update.in_flight

    def problems(self, cfg: Config) -> Iterator[str]:
        """Weights that cannot change while a request is running."""
        if not self.in_flight:
            return
        if self.max_lag < 1:
            yield (
                "schedule.max_lag must be >= 1 with schedule.update=in_flight (else none is running when "
                f"weights change), got {self.max_lag}; set schedule.max_lag=1"
            )
        elif not cfg.generator.has_worker(cfg):
            yield (
                "schedule.update must be between without a generator in a process of its own (no other can "
                f"take weights over while it samples), got in_flight with generator={cfg.generator.name}; "
                "set schedule.update=between"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """A run that cannot be repeated."""
        if self.in_flight:
            yield (
                "schedule.update=in_flight makes a run depend on timing (which weights sample a token): two "
                "equal runs will differ, and so will one that goes on from a checkpoint"
            )


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation during training."""

    prompts: int = 256  # held-out examples
    batch_size: int = 256  # sequences decoded at once where the generator does not sample
    temperature: float = 0.01  # near-greedy, as the paper's
    samples: int = 3  # rows of the table shown in the terminal
