"""Settings of the scorers. The same options serve as proxy (`scorer`) and as judge (`scorer@gold`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    from rlhf.config import Config


@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """What every scorer has."""

    name: str = MISSING
    missing_eos_score: float | None = None  # replaces the score of a response without end; null: leave it


@option("scorer", "reward_model")
@dataclass(kw_only=True, slots=True)
class RewardModelScorerConfig(ScorerConfig):
    """A sequence-classification model with one output, read at the last response token."""

    name: str = "reward_model"
    path: str | None = None  # hub name or local folder; null: model.reward
    batch_size: int = 32  # sequences a forward

    def problems(self, cfg: Config) -> Iterator[str]:
        """A judge without a model."""
        yield from ScorerConfig.problems(self, cfg)
        if self is cfg.gold and self.path is None:
            yield (
                "gold.path must name a reward model (the judge must not be the one that training sees), got "
                "null; set gold.path=<hub name or folder>"
            )


@option("scorer", "facts")
@dataclass(kw_only=True, slots=True)
class FactsScorerConfig(ScorerConfig):
    """The program that judges `task=tldr_mini`: facts covered, minus errors, filler and excess length."""

    name: str = "facts"


@option("scorer", "answer")
@dataclass(kw_only=True, slots=True)
class AnswerScorerConfig(ScorerConfig):
    """1 where the answer found in the response equals the one in the reference, else 0."""

    name: str = "answer"
    pattern: str = r"#### (\-?[0-9\.\,]+)"


@option("scorer", "labels")
@dataclass(kw_only=True, slots=True)
class LabelsScorerConfig(ScorerConfig):
    """The labels that come with stored completions."""

    name: str = "labels"
