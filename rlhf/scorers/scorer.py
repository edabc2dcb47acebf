"""The interface of a scorer: rollouts in, scores [N, K] out. Scorers of labels and of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.core.batch import Batch

if TYPE_CHECKING:
    from rlhf.config.model import ModelConfig
    from rlhf.config.scorer import LabelsScorerConfig, NoScorerConfig, ScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.processes.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerContext:
    """What a scorer gets from its run, besides its own section.

    Args:
        at: the key of the scorer's section: `scorer`, `gold`, or `scorer.parts.<name>`; for messages.
        tokenizer: the policy's tokenizer, in whose tokens rollouts are.
        ranks: the ranks of the run, and the device of this one.
        model: the section of the models.
        place: puts a frozen module on the device, or divides it over ranks, as the backend does.
        build: makes the scorer of another section and key, for a scorer that consists of scorers.
    """

    at: str
    tokenizer: PreTrainedTokenizerFast
    ranks: Ranks
    model: ModelConfig
    place: Callable[[Any], Any]
    build: Callable[[ScorerConfig, str], Scorer | None]


class Scorer(ABC):
    """Scores rollouts, and applies the rules of `config` for responses without EOS.

    Args:
        config: the section of the scorer.
        context: what the run provides.
    """

    config: ScorerConfig

    def __init__(self, config: ScorerConfig, context: ScorerContext) -> None:
        self.config = config
        self.at = context.at
        self.tokenizer: PreTrainedTokenizerBase = context.tokenizer
        self.ranks = context.ranks

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K], float32, without the rules for a missing EOS."""

    def __call__(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts with the scores that training sees.

        Rollouts that an annotator process has scored already (a `Batch`) are returned unchanged.
        """
        if isinstance(rollouts, Batch):
            return rollouts
        scores, parts = self.training_scores(rollouts)
        return rollouts.extend(Batch, scores=scores, parts=parts)

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the scores [N, K] after the rules for a missing EOS, and the scores of parts, if any."""
        return self.at_end(self.score(rollouts), rollouts.ended), None

    def at_end(self, scores: Tensor, ended: Tensor) -> Tensor:
        """Replace or lower the scores [N, K] of responses without EOS; `ended` is [N, K] bool."""
        replacement, penalty = self.config.missing_eos_score, self.config.missing_eos_penalty
        if replacement is not None:
            return torch.where(ended, scores, replacement)
        return scores if penalty is None else torch.where(ended, scores, scores - penalty)


def no_scorer(config: NoScorerConfig, context: ScorerContext) -> None:
    """Return None: `scorer@gold=none` has no judge."""


class LabelsScorer(Scorer):
    """The labels of stored completions; 0 for completions without labels."""

    config: LabelsScorerConfig

    def at_end(self, scores: Tensor, ended: Tensor) -> Tensor:
        """Return the labels unchanged: a label is valid whether or not the text was truncated."""
        return scores

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the labels [N, K]."""
        if rollouts.labels is None:
            return torch.zeros(rollouts.response_ids.shape[:2])
        return rollouts.labels


class TextScorer(Scorer):
    """A scorer that judges the text of each response. A subclass implements `judge`."""

    @abstractmethod
    def judge(self, prompt: str, response: str, reference: str) -> float:
        """Return the score of one response."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] of the responses' texts."""
        responses = response_texts(rollouts, self.tokenizer)
        return torch.tensor(
            [
                [self.judge(text, response, reference) for response in group]
                for text, reference, group in zip(rollouts.texts, rollouts.references, responses, strict=True)
            ],
            dtype=torch.float32,
        )


def response_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Return the responses as N lists of K texts, without special tokens."""
    N, K, _ = rollouts.response_ids.shape
    ids = torch.where(rollouts.response_mask, rollouts.response_ids, tokenizer.pad_token_id)
    flat = tokenizer.batch_decode(ids.flatten(0, 1), skip_special_tokens=True)
    return [flat[n * K : (n + 1) * K] for n in range(N)]


def flat_texts(
    rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str], list[str]]:
    """Return prompt, response and reference of each response: three lists of N * K texts."""
    groups = response_texts(rollouts, tokenizer)
    K = rollouts.response_ids.shape[1]
    prompts = [text for text in rollouts.texts for _ in range(K)]
    references = [text for text in rollouts.references for _ in range(K)]
    return prompts, [text for group in groups for text in group], references


def as_score(value: object) -> float | None:
    """Return a score from a user's code as a float; None if it is no number, or not finite in float32."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # any object that converts to a number
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= torch.finfo(torch.float32).max else None  # False for NaN
