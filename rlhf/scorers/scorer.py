"""What a scorer is: rollouts in, scores [N, K] out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Batch, Rollouts


class Scorer(ABC):
    """Scores rollouts. A response without a stop token is given `missing_eos_score` where that is set."""

    def __init__(self, missing_eos_score: float | None) -> None:
        self.missing_eos_score = missing_eos_score

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Tensor:
        """The scores [N, K], float32, as the judge gives them."""

    def __call__(self, rollouts: Rollouts) -> Batch:
        """The rollouts with scores, as training sees them."""
        scores = self.score(rollouts)
        if self.missing_eos_score is not None:
            scores = torch.where(rollouts.ended, scores, self.missing_eos_score)
        return rollouts.extend(Batch, scores=scores)


class LabelsScorer(Scorer):
    """The labels that stored completions came with; 0 where they have none."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """The labels [N, K]."""
        if rollouts.labels is None:
            return torch.zeros(rollouts.response_ids.shape[:2])
        return rollouts.labels


class TextScorer(Scorer):
    """A function of the texts: (prompt, response, reference) to a number."""

    def __init__(
        self,
        function: Callable[[str, str, str], float],
        tokenizer: PreTrainedTokenizerBase,
        missing_eos_score: float | None,
    ) -> None:
        super().__init__(missing_eos_score)
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
