"""Settings of resuming, of the progress display and of prerequisite stages."""

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
    """The form of the progress display."""

    auto = "auto"  # live in a terminal, else plain lines
    live = "live"
    plain = "plain"
    off = "off"


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """The stages that make prerequisites of a run: SFT model, preference pairs, reward model.

    A run of an embedded task makes the prerequisites that its config does not name. Runs of other tasks load
    models and data from the hub or, to try a recipe offline, use tiny stand-ins.
    """

    seed: int = 0  # seed of every stage; the run's own seed does not change the stages
    sft: list[str] = field(default_factory=list)  # overrides of the SFT stage, as on the command line
    reward: list[str] = field(default_factory=list)  # overrides of the reward-model stage
    pairs: int = 4096  # prompts for which two responses are sampled
    pairs_temperature: float = 0.7  # sampling temperature of the pairs
    stand_ins: bool = False  # tiny models and generated data, where a hub task names no model or folder
