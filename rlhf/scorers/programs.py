"""Scorers that are programs of this project: the judge of `task=tldr_mini`, and a check of answers."""

from __future__ import annotations

from rlhf.config.scorer import AnswerScorerConfig, FactsScorerConfig
from rlhf.scorers.answers import answer_matches
from rlhf.scorers.scorer import TextScorer
from rlhf.tasks.tldr_mini_judge import gold_score


class FactsScorer(TextScorer):
    """A scorer that returns the gold score of `task=tldr_mini`: facts, minus errors, filler and length."""

    config: FactsScorerConfig

    def judge(self, prompt: str, response: str, reference: str) -> float:
        """Return the gold score of the response, given the post in `prompt`; `reference` is not used."""
        return gold_score(prompt, response)


class AnswerScorer(TextScorer):
    """A scorer that returns 1 if the answer in the response equals the answer in the reference, else 0."""

    config: AnswerScorerConfig

    def judge(self, prompt: str, response: str, reference: str) -> float:
        """Return 1.0 if both texts contain the same answer, else 0.0."""
        return float(answer_matches(response, reference, self.config.pattern))
