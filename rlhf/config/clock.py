"""Sections of the clock (`clock=...`): whose time decides which weights sample which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf.config.schema import Section, entry, number, option


@option("clock", "wall", part="rlhf.training.events:build")
@dataclass(kw_only=True, slots=True)
class ClockConfig(Section):
    """The time of this machine: generators sample as fast as they can."""

    virtual: ClassVar[bool] = False  # True: generators and trainer work in virtual time

    name: str = entry("wall", added=True)


@option("clock", "virtual", part="rlhf.training.events:VirtualStream")
@dataclass(kw_only=True, slots=True)
class VirtualConfig(ClockConfig):
    """The virtual time of a cluster that is simulated in this process, the same on every machine."""

    virtual: ClassVar[bool] = True

    name: str = "virtual"
    slots: int | None = number(
        None,
        least=1,
        means="sequences decoded at the same time; null: as many as can be in flight, N K (max_lag + 1)",
        remedy="64",
    )
    step_s: float = number(1.0, above=0, means="seconds of a decoding step of one sequence")
    step_growth: float = number(0.0, least=0, means="growth of these seconds with each running sequence")
    prefill: float = number(
        0.0,
        least=0,
        means="steps per token that is encoded: prompts, messages of environments, and both after each load",
    )
    spread: float = number(
        0.0, least=0, means="standard deviation of the log of a factor on the steps per token"
    )
    shared: float = number(
        0.8, least=0, most=1, means="part of the spread that belongs to the prompt, not to the sample"
    )
    longest: float | None = number(
        None, least=1, means="largest factor, as a multiple of its median; null: no limit", remedy="20"
    )
    stretch: float = number(
        1.0,
        least=1,
        means="exponent: n of at most T tokens take T (n / T)^stretch steps, times the factor; "
        "1: n steps, 8: a tail of long responses that the policy can learn to avoid",
    )
    balance: float = number(
        1.0, above=0, means="seconds of an update, as a multiple of the ideal generation of its batch"
    )
    train_s: float | None = number(
        None, least=0, means="constant seconds of an update, instead of balance", remedy="10"
    )
    train_token_s: float = number(0.0, least=0, means="with train_s, further seconds per token of the batch")
    score_s: float = number(0.0, least=0, means="seconds from the end of a group until it is scored")
    sync_s: float = number(
        0.0, least=0, means="seconds from the end of training until the generators have the weights"
    )
    pause_s: float = number(0.0, least=0, means="seconds after a load in which no sequence advances")

    def seconds_of_step(self, running: int) -> float:
        """Return the seconds of a decoding step with `running` sequences."""
        return self.step_s * (1 + self.step_growth * running)

    def seconds_of_update(self, steps: float, tokens: int, slots: int) -> float:
        """Return the seconds of training on a batch.

        Args:
            steps: decoding steps of all sequences of the batch, summed.
            tokens: tokens of the batch.
            slots: sequences that are decoded at the same time.
        """
        if self.train_s is not None:
            return self.train_s + self.train_token_s * tokens
        return self.balance * steps * self.seconds_of_step(slots) / slots
