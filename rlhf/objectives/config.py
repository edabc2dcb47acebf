"""Settings of the objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from rlhf.config import Config
    from rlhf.objectives.objective import Objective


class Trains(Enum):
    """Which model a run trains, and so what it starts from and how it is evaluated."""

    base = "base"  # a language model from the base model (or from nothing)
    policy = "policy"  # the policy, against its frozen reference
    reward = "reward"  # a reward model, from the policy's weights


class Data(Enum):
    """What one example of the training data holds."""

    prompts = "prompts"  # a prompt; the generator responds
    references = "references"  # a prompt and its reference response
    preferences = "preferences"  # a prompt, a chosen and a rejected response


class DPOLoss(Enum):
    """The loss on the margin of a pair."""

    sigmoid = "sigmoid"
    ipo = "ipo"


class Ties(Enum):
    """What becomes of a prompt whose best and worst scores are equal."""

    drop = "drop"  # it leaves the sum and the count
    keep = "keep"  # first best against last worst, as the original did


@dataclass(kw_only=True, slots=True)
class AlgoConfig(Section):
    """What every objective has. `samples_per_prompt` is K."""

    trains: ClassVar[Trains] = Trains.policy
    data: ClassVar[Data] = Data.prompts
    supervised: ClassVar[bool] = False  # counts epochs and examples; needs generator=dataset
    min_samples: ClassVar[int] = 1

    name: str = MISSING
    samples_per_prompt: int = 1

    def build(self) -> Objective:
        """Make the objective; this is where torch is first imported."""
        raise NotImplementedError

    def problems(self, cfg: Config) -> Iterator[str]:
        """Too few samples of a prompt."""
        if self.samples_per_prompt < self.min_samples:
            reason = "it ranks completions of one prompt" if self.min_samples == 2 else "it needs a sample"
            yield (
                f"algo.samples_per_prompt must be >= {self.min_samples} for {self.name} ({reason}), "
                f"got {self.samples_per_prompt}; set algo.samples_per_prompt={self.min_samples}"
            )


@option("algo", "dpo")
@dataclass(kw_only=True, slots=True)
class DPOConfig(AlgoConfig):
    """Online DPO: best against worst of K samples. With `generator=dataset`: offline DPO on stored pairs."""

    min_samples: ClassVar[int] = 2

    name: str = "dpo"
    samples_per_prompt: int = 2
    loss_type: DPOLoss = DPOLoss.sigmoid
    beta: float = 0.1
    ties: Ties = Ties.drop

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.dpo import OnlineDPO

        return OnlineDPO(self)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and beta."""
        yield from AlgoConfig.problems(self, cfg)
        if self.beta <= 0:
            yield (
                f"algo.beta must be > 0 for dpo (it scales the log-ratio to the reference), "
                f"got {self.beta}; set algo.beta=0.1"
            )


@option("algo", "sft")
@dataclass(kw_only=True, slots=True)
class SFTConfig(AlgoConfig):
    """Supervised fine-tuning: cross-entropy of the reference response, EOS included."""

    trains: ClassVar[Trains] = Trains.base
    data: ClassVar[Data] = Data.references
    supervised: ClassVar[bool] = True

    name: str = "sft"

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.sft import SFT

        return SFT(self)


@option("algo", "reward")
@dataclass(kw_only=True, slots=True)
class RewardConfig(AlgoConfig):
    """Reward modelling: Bradley-Terry on chosen and rejected."""

    trains: ClassVar[Trains] = Trains.reward
    data: ClassVar[Data] = Data.preferences
    supervised: ClassVar[bool] = True
    min_samples: ClassVar[int] = 2

    name: str = "reward"
    samples_per_prompt: int = 2

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.reward import RewardModelling

        return RewardModelling(self)
