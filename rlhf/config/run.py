"""Settings of resuming, of the progress display and of prerequisite stages."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema import Choice, Section, entry


class Resume(Choice):
    """What to do with a run folder that exists."""

    auto = "auto", "resume from its last complete checkpoint"
    never = "never", "move the folder aside and start again"
    must = "must", "fail if there is no checkpoint to resume from"


class Progress(Choice):
    """The form of the progress display."""

    auto = "auto", "live in a terminal, else plain lines"
    live = "live"
    plain = "plain"
    off = "off"


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """The stages that make prerequisites of a run: SFT model, preference pairs, reward model.

    A run of an embedded task makes the prerequisites that its config does not name. Runs of other tasks load
    models and data from the hub or, to try a recipe offline, use tiny stand-ins.
    """

    seed: int = entry(0, means="seed of every stage; the run's own seed does not change the stages")
    sft: list[str] = entry(factory=list, means="overrides of the SFT stage, as on the command line")
    reward: list[str] = entry(factory=list, means="overrides of the reward-model stage")
    pairs: int = entry(4096, means="prompts for which two responses are sampled")
    pairs_temperature: float = entry(0.7, means="sampling temperature of the pairs")
    stand_ins: bool = entry(
        False, means="tiny models and generated data, where a hub task names no model or folder", added=True
    )
