"""Choices of the root config: resuming, progress display, prerequisite stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rlhf.config.schema import Section


class Resume(Enum):
    """What to do with a run folder that exists."""

    auto = "auto"  # go on from its last complete checkpoint
    never = "never"  # move it aside and start again
    must = "must"  # fail where there is nothing to go on from


class Progress(Enum):
    """How progress is shown."""

    auto = "auto"  # live in a terminal, else plain lines
    live = "live"
    plain = "plain"
    off = "off"


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """How what a run does not name is made: SFT model, preference pairs, reward model.

    Embedded tasks train them; `sft` and `reward` are overrides of those stages, as on a command line. Other
    tasks have theirs from the hub, or, to try a recipe offline, stand-ins.
    """

    seed: int = 0  # of every stage; the run's own seed leaves them alone
    sft: list[str] = field(default_factory=list)
    reward: list[str] = field(default_factory=list)
    pairs: int = 4096  # prompts that two responses are sampled for
    pairs_temperature: float = 0.7
    stand_ins: bool = False  # tiny random models, and data made up, where a task of the hub names no folder
