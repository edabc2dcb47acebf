"""Choices of the root config: resuming, progress display, prerequisite stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rlhf.config.schema import Section


class Resume(Enum):
    """What to do with a run folder that exists."""

    auto = "auto"  # resume from its last complete checkpoint
    never = "never"  # move the folder aside and start again
    must = "must"  # fail if there is no checkpoint to resume from


class Progress(Enum):
    """How progress is shown."""

    auto = "auto"  # live in a terminal, else plain lines
    live = "live"
    plain = "plain"
    off = "off"


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """How prerequisites that a run does not name are made: SFT model, preference pairs, reward model.

    Embedded tasks train them; `sft` and `reward` are overrides of those stages, as on a command line. Other
    tasks load them from the hub, or use tiny stand-ins, to try a recipe offline.
    """

    seed: int = 0  # seed of every stage; the run's own seed does not change the stages
    sft: list[str] = field(default_factory=list)  # overrides of the SFT stage
    reward: list[str] = field(default_factory=list)  # overrides of the reward-model stage
    pairs: int = 4096  # prompts for which two responses are sampled
    pairs_temperature: float = 0.7  # sampling temperature of the pairs
    stand_ins: bool = False  # tiny random models and made-up data, for a hub task that names no folder
