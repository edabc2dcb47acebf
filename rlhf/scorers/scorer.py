"""What a scorer is: rollouts in, scores [N, K] out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.batch import Batch

if TYPE_CHECKING:
    from rlhf.config.scorer import ScorerConfig
    from rlhf.core.batch import Rollouts


class Scorer(ABC):
    """Scores rollouts. A response without a stop token is scored as `config` has it."""

    def __init__(self, config: ScorerConfig) -> None:
        self.config = config

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Tensor:
        """The scores [N, K], float32, as the judge gives them."""

    def __call__(self, rollouts: Rollouts) -> Batch:
        """The rollouts with scores, as training sees them.

        Those that were scored ahead (`rlhf/generators/annotated.py`) have them, and are passed on.
        """
        if isinstance(rollouts, Batch):
            return rollouts
        scores, parts = self.training_scores(rollouts)
        return rollouts.extend(Batch, scores=scores, parts=parts)

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The scores [N, K], a missing end accounted for; and those of their parts, where they have any."""
        return self.at_end(self.score(rollouts), rollouts.ended), None

    def at_end(self, scores: Tensor, ended: Tensor) -> Tensor:
        """The scores [N, K], those of responses that have not `ended` ([N, K] bool) replaced or lowered."""
        replacement, penalty = self.config.missing_eos_score, self.config.missing_eos_penalty
        if replacement is not None:
            return torch.where(ended, scores, replacement)
        return scores if penalty is None else torch.where(ended, scores, scores - penalty)


class LabelsScorer(Scorer):
    """The labels that stored completions came with; 0 where they have none."""

    def at_end(self, scores: Tensor, ended: Tensor) -> Tensor:
        """The labels: one is given, whether the text was cut or not."""
        return scores

    def score(self, rollouts: Rollouts) -> Tensor:
        """The labels [N, K]."""
        if rollouts.labels is None:
            return torch.zeros(rollouts.response_ids.shape[:2])
        return rollouts.labels


class TextScorer(Scorer):
    """A function of the texts: (prompt, response, reference) to a number."""

    def __init__(
        self,
        config: ScorerConfig,
        function: Callable[[str, str, str], float],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(config)
        self.function = function
        self.tokenizer = tokenizer

    def score(self, rollouts: Rollouts) -> Tensor:
        """Call the function on each response's text."""
        responses = response_texts(rollouts, self.tokenizer)
        return torch.tensor(
            [
                [self.function(text, response, reference) for response in group]
                for text, reference, group in zip(rollouts.texts, rollouts.references, responses, strict=True)
            ],
            dtype=torch.float32,
        )


def response_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """The responses as N lists of K texts, without special tokens."""
    N, K, _ = rollouts.response_ids.shape
    ids = torch.where(rollouts.response_mask, rollouts.response_ids, tokenizer.pad_token_id)
    flat = tokenizer.batch_decode(ids.flatten(0, 1), skip_special_tokens=True)
    return [flat[n * K : (n + 1) * K] for n in range(N)]


def flat_texts(
    rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str], list[str]]:
    """Prompt, response and reference of each response: three lists of N times K texts."""
    groups = response_texts(rollouts, tokenizer)
    K = rollouts.response_ids.shape[1]
    prompts = [text for text in rollouts.texts for _ in range(K)]
    references = [text for text in rollouts.references for _ in range(K)]
    return prompts, [text for group in groups for text in group], references


def as_score(value: object) -> float | None:
    """What somebody else's code gave as a score, as a number; None where it is none, or not finite."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever has a number in it
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= torch.finfo(torch.float32).max else None  # NaN is not
