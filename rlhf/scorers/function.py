"""A scorer that calls a Python function of the user."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.config.address import load_function
from rlhf.core.errors import RunError
from rlhf.scorers.scorer import Scorer, as_score, flat_texts

if TYPE_CHECKING:
    from rlhf.config.scorer import FunctionScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext

ONE = ("prompt", "response", "reference")
MANY = ("prompts", "responses", "references")


class FunctionScorer(Scorer):
    """A scorer that calls a function of (prompt, response, reference); of three lists if `config.batched`.

    Rank 0 calls the function for all ranks.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.

    Raises:
        UserError: the module cannot be imported, or has no function that accepts these arguments.
    """

    config: FunctionScorerConfig

    def __init__(self, config: FunctionScorerConfig, context: ScorerContext) -> None:
        super().__init__(config, context)
        assert config.path is not None, "validated: a function is named"
        self.function = load_function(f"{self.at}.path", config.path, MANY if config.batched else ONE)
        self.name = f"{self.at}.path={config.path}"

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the function returns.

        Raises:
            RunError: the function raised an exception, or returned something that is not a score.
        """
        return self.ranks.from_first(lambda: self.given(rollouts))

    def given(self, rollouts: Rollouts) -> Tensor:
        """Call the function in this process, and return the scores [N, K].

        Raises:
            RunError: the function raised an exception, or returned something that is not a score.
        """
        texts = flat_texts(rollouts, self.tokenizer)
        N, K, _ = rollouts.response_ids.shape
        examples = [
            f"row {row} of the data set, response {response!r:.200}"
            for row, response in zip(rollouts.index.repeat_interleave(K).tolist(), texts[1], strict=True)
        ]
        if self.config.batched:
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
                    f"{self.name} returned {value!r:.80} for {example}; a score must be a finite number that "
                    "float32 can represent: correct the function"
                )
        return torch.tensor(scores, dtype=torch.float32).view(N, K)

    def call(self, *arguments: Any, example: str) -> Any:
        """Return the result of the function for `arguments`.

        Raises:
            RunError: the function raised an exception; `example` describes the responses in the message.
        """
        try:
            return self.function(*arguments)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = frames[min(1, len(frames) - 1)]  # frame 0 is `call`, frame 1 the function
            raise RunError(
                f"{self.name} raised {type(error).__name__}: {error} ({where.filename}, line {where.lineno}) "
                f"for {example}; correct the function"
            ) from error

    def listed(self, given: Any, count: int, example: str) -> Sequence[Any]:
        """Return the result `given` of a batched function as a list of `count` scores.

        Raises:
            RunError: the result is not a list of `count` items; `example` describes the first response.
        """
        try:
            scores = list(given)
        except TypeError:
            scores = None
        if scores is None or len(scores) != count:
            what = f"{type(given).__name__} {given!r:.80}" if scores is None else f"{len(scores)} scores"
            raise RunError(
                f"{self.name} returned {what} for {count} responses, the first of {example}; with "
                f"{self.at}.batched=true it must return a list with one score per response: correct the "
                f"function, or set {self.at}.batched=false"
            )
        return scores
