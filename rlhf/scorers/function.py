"""A scorer that calls a Python function of the user."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Set, Sized
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf.config.address import load_function
from rlhf.core.errors import RunError
from rlhf.core.formatting import shortened
from rlhf.scorers.scorer import Scorer, as_score, distinct_texts, not_a_score

if TYPE_CHECKING:
    from rlhf.config.scorer import FunctionScorerConfig
    from rlhf.core.batch import Rollouts
    from rlhf.scorers.scorer import ScorerContext


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
        self.function = load_function(f"{self.at}.path", config.path, config.arguments)
        self.name = f"{self.at}.path={config.path}"

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K] that the function returns.

        Raises:
            RunError: the function raised an exception, or returned something that is not a score.
        """
        return self.ranks.from_first(lambda: self.given(rollouts))

    def given(self, rollouts: Rollouts) -> Tensor:
        """Call the function in this process for the distinct responses, and return the scores [N, K].

        Raises:
            RunError: the function raised an exception, or returned something that is not a score.
        """
        texts = distinct_texts(rollouts, self.tokenizer)
        lists = texts.prompts, texts.responses, texts.references
        count = len(texts.responses)
        examples = [
            f"row {row} of the data set, response {shortened(repr(response), 200)}"
            for row, response in zip(texts.rows, texts.responses, strict=True)
        ]
        if self.config.batched:
            given = self.call(*lists, example=f"{count} responses, the first of {examples[0]}")
            given = self.listed(given, count, examples[0])
        else:
            given = [
                self.call(*three, example=example) for *three, example in zip(*lists, examples, strict=True)
            ]
        scores = []
        for value, example in zip(given, examples, strict=True):
            if (score := as_score(value)) is None:
                raise RunError(
                    f"{self.name} returned {shortened(repr(value), 80)} for {example}; a score must be a "
                    f"finite number{not_a_score(value)}: correct the function{self.hint(value)}"
                )
            scores.append(score)
        return texts.spread(scores)

    def call(self, *arguments: Any, example: str) -> Any:
        """Return the result of the function for `arguments`; of a batched function, its items as a list.

        Raises:
            RunError: the function raised an exception, whose traceback is that of `__cause__`, or called
                `sys.exit`; `example` describes the responses in the message.
        """
        try:
            given = self.function(*arguments)
            return items(given) if self.config.batched else given
        except (Exception, SystemExit) as error:
            did = (
                f"called sys.exit({error.code!r})"
                if isinstance(error, SystemExit)
                else f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
            )
            takes = " (it receives lists)" if self.config.batched else ""
            raise RunError(
                f"{self.name} {did}{place(error)} for {example}; correct the function{takes}"
            ) from error

    def listed(self, given: Any, count: int, example: str) -> list[Any]:
        """Return the result `given` of a batched function, which must be a list of `count` scores.

        Raises:
            RunError: the result is not a list of `count` items; `example` describes the first response.
        """
        if not isinstance(given, list) or len(given) != count:
            what = f"{type(given).__name__} {shortened(repr(given), 80)}"
            if isinstance(given, list):
                what = f"{len(given)} scores"
            raise RunError(
                f"{self.name} returned {what} for {count} responses, the first of {example}; with "
                f"{self.at}.batched=true it must return a list with one score per response: correct the "
                f"function, or set {self.at}.batched=false"
            )
        return given

    def hint(self, value: object) -> str:
        """Return an addition to the remedy if `value`, returned for one response, has several items."""
        if self.config.batched or isinstance(value, str | bytes) or not isinstance(value, Sized):
            return ""
        return f", or set {self.at}.batched=true if it takes and returns lists"


def items(given: Any) -> Any:
    """Return the items of a list, array, tensor or generator as a list; any other value unchanged."""
    if isinstance(given, str | bytes | Mapping | Set):  # a set has no order
        return given
    try:
        iterator = iter(given)
    except TypeError:
        return given
    return list(iterator)


def place(error: BaseException) -> str:
    """Return, for a message, the innermost line of the user's file in the traceback of `error`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
