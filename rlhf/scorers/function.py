"""A Python function of the user's as scorer."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.config.address import load_function
from rlhf.core.errors import RunError
from rlhf.processes.ranks import ALONE
from rlhf.scorers.scorer import Scorer, as_score, flat_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import FunctionScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.processes.ranks import Ranks


ONE = ("prompt", "response", "reference")


MANY = ("prompts", "responses", "references")


class FunctionScorer(Scorer):
    """Calls a function of (prompt, response, reference), or of three lists where `config.batched`.

    Args:
        config: its settings.
        key: where they are in the config.
        tokenizer: the policy's.
        ranks: of which the first calls the function for all.

    Raises:
        UserError: the function is not there, or takes other arguments.
    """

    def __init__(
        self,
        config: FunctionScorerConfig,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(config)
        assert config.path is not None, "validated: a function is named"
        self.function = load_function(f"{key}.path", config.path, MANY if config.batched else ONE)
        self.batched = config.batched
        self.key = key
        self.name = f"{key}.path={config.path}"
        self.tokenizer = tokenizer
        self.ranks = ranks

    def score(self, rollouts: Rollouts) -> Tensor:
        """What the function gives [N, K].

        Raises:
            RunError: it raised an exception, or gave what is no score.
        """
        return self.ranks.from_first(lambda: self.given(rollouts))

    def given(self, rollouts: Rollouts) -> Tensor:
        """The same, asked for here."""
        texts = flat_texts(rollouts, self.tokenizer)
        N, K, _ = rollouts.response_ids.shape
        examples = [
            f"row {row} of the data set, response {response!r:.200}"
            for row, response in zip(rollouts.index.repeat_interleave(K).tolist(), texts[1], strict=True)
        ]
        if self.batched:
            given = self.call(*texts, example=f"{N * K} responses, the first of {examples[0]}")
            given = self.listed(given, N * K, examples[0])
        else:
            given = [
                self.call(*three, example=example) for *three, example in zip(*texts, examples, strict=True)
            ]
        scores = [as_score(value) for value in given]
        for score, value, example in zip(scores, given, examples, strict=True):
            if score is None:
                raise RunError(
                    f"{self.name} gave {value!r:.80} for {example}; a score must be a finite number: mend "
                    "the function"
                )
        return torch.tensor(scores, dtype=torch.float32).view(N, K)

    def call(self, *arguments: Any, example: str) -> Any:
        """What the function gives for `arguments`."""
        try:
            return self.function(*arguments)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = frames[min(1, len(frames) - 1)]  # behind this one, the function itself
            raise RunError(
                f"{self.name} raised {type(error).__name__}: {error} ({where.filename}, line {where.lineno}) "
                f"for {example}; mend the function"
            ) from error

    def listed(self, given: Any, count: int, example: str) -> Sequence[Any]:
        """What a function of lists gave, as a list of `count` scores."""
        try:
            scores = list(given)
        except TypeError:
            scores = None
        if scores is None or len(scores) != count:
            what = f"{type(given).__name__} {given!r:.80}" if scores is None else f"{len(scores)} scores"
            raise RunError(
                f"{self.name} gave {what} for {count} responses, the first of {example}; with "
                f"{self.key}.batched=true it must give a list of one score a response: mend the function, or "
                f"set {self.key}.batched=false"
            )
        return scores
