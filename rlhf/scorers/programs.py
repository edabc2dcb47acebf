"""Scorers that are programs of this project: the judge of `task=tldr_mini`, and a check of answers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from rlhf.config.scorer import AnswerScorerConfig, FactsScorerConfig
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


def find_answer(text: str, pattern: str) -> str | None:
    """Return the last match of `pattern` in a text; if the pattern has groups, return the first group.

    The result is None if nothing matches. The last match is the answer, because a worked solution may contain
    intermediate results that match too.
    """
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()


def _normalize_answer(answer: str) -> str | Decimal:
    """Return an answer in a form in which equal answers compare as equal.

    Surrounding space, final dots, all commas and a leading dollar sign are removed. A finite number becomes a
    Decimal, so that 5.0 == 5; any other answer stays a text.
    """
    bare = answer.strip().rstrip(".,").replace(",", "").removeprefix("$")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return bare
    return number if number.is_finite() else bare


def answer_matches(response: str, reference: str, pattern: str) -> bool:
    """Return True if the answers in `response` and `reference` are equal; False if either has no answer."""
    answer, expected = find_answer(response, pattern), find_answer(reference, pattern)
    if answer is None or expected is None:
        return False
    return _normalize_answer(answer) == _normalize_answer(expected)
