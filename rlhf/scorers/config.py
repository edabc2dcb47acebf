"""Settings of the scorers. The same options serve as proxy (`scorer`) and as judge (`scorer@gold`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from rlhf.schema import Section, option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from rlhf.config import Config
    from rlhf.scorers.scorer import Scorer


@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """What every scorer has."""

    name: str = MISSING
    missing_eos_score: float | None = None  # replaces the score of a response without end; null: leave it

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Scorer | None:
        """Make the scorer for rollouts in the policy's tokens; None: there is nothing to judge with."""
        raise NotImplementedError


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

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Scorer:
        """Load the reward model, and its own tokenizer where that differs from the policy's."""
        from rlhf.scorers.reward_model import load_scorer

        return load_scorer(self, cfg, tokenizer, device)


@option("scorer", "facts")
@dataclass(kw_only=True, slots=True)
class FactsScorerConfig(ScorerConfig):
    """The program that judges `task=tldr_mini`: facts covered, minus errors, filler and excess length."""

    name: str = "facts"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Scorer:
        """Wrap the program."""
        from rlhf.scorers.scorer import TextScorer
        from rlhf.tasks.tldr_mini import gold_score

        return TextScorer(
            lambda query, response, _: gold_score(query, response), tokenizer, self.missing_eos_score
        )


@option("scorer", "answer")
@dataclass(kw_only=True, slots=True)
class AnswerScorerConfig(ScorerConfig):
    """1 where the answer found in the response equals the one in the reference, else 0."""

    name: str = "answer"
    pattern: str = r"#### (\-?[0-9\.\,]+)"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Scorer:
        """Wrap the comparison of answers."""
        from rlhf.scorers.answers import answer_matches
        from rlhf.scorers.scorer import TextScorer

        def score(query: str, response: str, reference: str) -> float:
            return float(answer_matches(response, reference, self.pattern))

        return TextScorer(score, tokenizer, self.missing_eos_score)


@option("scorer", "labels")
@dataclass(kw_only=True, slots=True)
class LabelsScorerConfig(ScorerConfig):
    """The labels that come with stored completions."""

    name: str = "labels"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Scorer:
        """Pass the labels on."""
        from rlhf.scorers.scorer import LabelsScorer

        return LabelsScorer(missing_eos_score=None)  # a label is given, whether the text was cut or not


@option("scorer", "none")
@dataclass(kw_only=True, slots=True)
class NoScorerConfig(ScorerConfig):
    """No judge: evaluation measures what needs none. Only as `scorer@gold=none`."""

    name: str = "none"

    def problems(self, cfg: Config) -> Iterator[str]:
        """Training without a score."""
        if self is cfg.scorer:
            yield "scorer must be one that scores (training needs scores), got none; set scorer=reward_model"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        """Nothing to judge with."""
