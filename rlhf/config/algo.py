"""Sections of the algorithms (`algo=...`): what all have, pairs, best-of-K and supervised training.

Policy gradients are in `rlhf.config.policy_gradient` and `rlhf.config.off_policy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Choice, Section, entry, number, option


class Trains(Choice):
    """The model that a run trains; the choice determines the initial weights and the evaluation."""

    base = "base", "a language model, from the base model (or from random weights)"
    policy = "policy", "the policy, compared with its frozen reference"
    reward = "reward", "a reward model, from the policy's weights"


class Data(Choice):
    """The content of one example of the training data."""

    prompts = "prompts", "a prompt; the generator samples the responses"
    references = "references", "a prompt and its reference response"
    preferences = "preferences", "a prompt, a chosen and a rejected response"


class DPOLoss(Choice):
    """The loss on the margin of a preference pair."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


# The weight that multiplies the loss of a preference pair. A class body cannot name a member `is`, a keyword.
PairWeighting = Enum("PairWeighting", {"none": "none", "is": "is", "wpo": "wpo"})


class Ties(Choice):
    """What to do with a prompt whose best and worst scores are equal."""

    drop = "drop", "exclude the prompt from the loss and from the count of prompts"
    keep = "keep", "include the prompt; dpo then compares the first sample with the last sample"


@dataclass(kw_only=True, slots=True)
class AlgoConfig(Section):
    """The keys that every algorithm has. `samples_per_prompt` is K."""

    trains: ClassVar[Trains] = Trains.policy
    data: ClassVar[Data] = Data.prompts
    supervised: ClassVar[bool] = False  # True: counts epochs and examples, and requires generator=dataset
    min_samples: ClassVar[int] = 1  # smallest K
    keeps: ClassVar[int | None] = None  # number of samples of a prompt that are trained on; None: all K

    pairwise: ClassVar[bool] = False  # True: the loss compares two responses of a prompt
    learns_from_ties: ClassVar[bool] = False  # True: prompts whose scores are all equal are trained on, too

    name: str = MISSING
    samples_per_prompt: int = entry(1, means="K, responses of one prompt")
    tie_tolerance: float | None = number(
        None,
        least=0,
        means="scores a and b tie if |a - b| <= tie_tolerance * max(1, |a|, |b|); 0: only equal scores tie; "
        "null: for a reward model 1e-5 in float32, 1e-2 in bfloat16, 1e-3 in float16, else 0",
        remedy="null",
        added=True,
    )

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss needs the log-probs of the sampler, even if the samples are stored."""
        return False

    @property
    def value_lr(self) -> float | None:
        """The learning rate of the value model; None: `optim.lr`, or there is no value model."""
        return None

    def corrections(self) -> list[str]:
        """Return settings that make updates on samples of older weights more stable."""
        return []

    def problems(self, at: str) -> Iterator[str]:
        """Yield the errors of single fields, then an error if there are too few samples of a prompt."""
        yield from Section.problems(self, at)
        if self.samples_per_prompt < self.min_samples:
            reason = "it ranks completions of one prompt" if self.min_samples == 2 else "it needs a sample"
            yield (
                f"algo.samples_per_prompt must be >= {self.min_samples} for {self.name} ({reason}), "
                f"got {self.samples_per_prompt}; set algo.samples_per_prompt={self.min_samples}"
            )


@option("algo", "dpo", part="rlhf.objectives.dpo:OnlineDPO")
@dataclass(kw_only=True, slots=True)
class DPOConfig(AlgoConfig):
    """Online DPO on the best and the worst of K samples. With `generator=dataset`: offline DPO on pairs."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 2
    pairwise: ClassVar[bool] = True

    name: str = "dpo"
    samples_per_prompt: int = 2
    loss_type: DPOLoss = DPOLoss.sigmoid
    beta: float = number(
        0.1,
        above=0,
        means="strength of the KL constraint; a higher value keeps the policy near the reference",
    )
    label_smoothing: float = number(
        0.0, least=0, below=0.5, means="fraction of labels that are assumed wrong; sigmoid and robust"
    )
    length_normalised: bool = entry(
        False, means="divide each log-ratio by the number of tokens of its response"
    )
    ties: Ties = Ties.drop
    weighting: PairWeighting = entry(
        PairWeighting.none,
        means="weight of the loss of a pair: `is`: probability ratio of policy to sampler, of both responses "
        "together; `wpo`: how probable both responses are under the policy, per token; `none`: 1",
        added=True,
    )
    weighting_eps: float = number(
        1.0, least=0, means="weighting=is: weights have the upper bound exp(2 weighting_eps)", added=True
    )
    weighting_clamp: float | None = number(
        1.0, above=0, means="weighting=wpo: upper bound of the weights; null: no bound", added=True
    )

    def corrections(self) -> list[str]:
        """Return the setting that weights pairs, if they have no weights."""
        return ["algo.weighting=is"] if self.weighting is PairWeighting.none else []

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each key that is set and that the loss or the weighting does not use."""
        if self.label_smoothing and self.loss_type in (DPOLoss.ipo, DPOLoss.hinge):
            yield f"algo.label_smoothing has no effect with algo.loss_type={self.loss_type.value}"
        for name, user in (("weighting_eps", PairWeighting["is"]), ("weighting_clamp", PairWeighting.wpo)):
            if self.weighting is not user and getattr(self, name) != 1.0:
                yield (
                    f"algo.{name} has no effect with algo.weighting={self.weighting.value} (it belongs to "
                    f"algo.weighting={user.value})"
                )


@option("algo", "bok", part="rlhf.objectives.bok:BestOfK")
@dataclass(kw_only=True, slots=True)
class BestOfKConfig(AlgoConfig):
    """Best-of-K fine-tuning: maximum likelihood of the best of K samples."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 1

    name: str = "bok"
    samples_per_prompt: int = 2
    ties: Ties = Ties.drop


@option("algo", "sft", part="rlhf.objectives.sft:SFT")
@dataclass(kw_only=True, slots=True)
class SFTConfig(AlgoConfig):
    """Supervised fine-tuning: cross-entropy of the reference response, EOS included."""

    trains: ClassVar[Trains] = Trains.base
    data: ClassVar[Data] = Data.references
    supervised: ClassVar[bool] = True

    name: str = "sft"


@option("algo", "reward", part="rlhf.objectives.reward_modelling:RewardModelling")
@dataclass(kw_only=True, slots=True)
class RewardConfig(AlgoConfig):
    """Reward modelling: Bradley-Terry loss on chosen and rejected responses."""

    trains: ClassVar[Trains] = Trains.reward
    data: ClassVar[Data] = Data.preferences
    supervised: ClassVar[bool] = True
    min_samples: ClassVar[int] = 2
    pairwise: ClassVar[bool] = True

    name: str = "reward"
    samples_per_prompt: int = 2
