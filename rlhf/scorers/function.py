"""Scorers that call Python functions: of the user, of this project, of reasoning-gym."""

from __future__ import annotations

import json
import math
import re
from ast import literal_eval
from collections.abc import Mapping, Set, Sized
from copy import deepcopy
from dataclasses import replace
from decimal import Context, Decimal
from functools import cache
from inspect import isawaitable
from typing import Any, NamedTuple

import xxhash
from torch import Tensor

from rlhf.config.scorers import (
    AnswerScorerConfig,
    FactsScorerConfig,
    FunctionScorerConfig,
    ReasoningGymScorerConfig,
)
from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError, one_line, place_in_code
from rlhf.core.formatting import as_score, not_a_score, shortened
from rlhf.environments import environment
from rlhf.environments.environment import transcripts
from rlhf.processes.signals import end_wait
from rlhf.scorers import scorer
from rlhf.tasks.tldr_mini import gold_score
from rlhf.usercode.address import GIVEN, load_function, parameters_of, signature_of
from rlhf.usercode.protection import protected

# A scorer that calls a Python function of the user, or the weighted sum of several functions.


_POLL_S = 0.2  # between two checks for a signal


def build(config: FunctionScorerConfig, context: scorer.ScorerContext) -> scorer.Scorer:
    """Return the scorer of a function; of a list of functions, the weighted sum of their scores."""
    if not isinstance(config.path, list):
        return FunctionScorer(config, context)
    together: list[FunctionScorer] = []
    build_one = lambda section, _: FunctionScorer(section, context, together)  # noqa: E731
    return scorer.WeightedScorer(config.as_sum(config.functions()), replace(context, build=build_one))


class _Made(NamedTuple):
    """The calls of a function for the responses of rollouts."""

    rollouts: Rollouts
    texts: scorer.DistinctTexts
    examples: list[str]  # for messages, of each response
    of_calls: list[str]  # for messages, of each call
    results: list[Any]


class FunctionScorer(scorer.Scorer):
    """A scorer that calls a function for each distinct response; once with lists if `config.batched`.

    The calls of an asynchronous function, and of others of its list, run concurrently in an event loop.

    `rlhf.usercode.address` describes what the function receives. Rank 0 calls the function for all ranks. A
    function may draw random numbers and change global settings: both have no effect outside of the call.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.
        together: the scorers of a list of functions, to which this one is added.

    Raises:
        UserError: the module cannot be imported, or has no function that accepts these arguments.
    """

    config: FunctionScorerConfig

    def __init__(
        self,
        config: FunctionScorerConfig,
        context: scorer.ScorerContext,
        together: list[FunctionScorer] | None = None,
    ) -> None:
        super().__init__(config, context)
        assert config.path is not None, "validated: a function is named"
        self.function = load_function(f"{self.at}.path", config.path, config.arguments)
        self.parameters = parameters_of(signature_of(self.function))
        self.name = f"{self.at}.path={config.path}"
        self.turns = context.turns
        self.together = [] if together is None else together
        self.together.append(self)
        self.made: _Made | None = None

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
        with protected(xxhash.xxh3_64_intdigest(rollouts.response_ids.cpu().numpy().tobytes())):
            if self.made is None or self.made.rollouts is not rollouts:
                self.call_all(rollouts)
            assert self.made is not None
            made, self.made = self.made, None
            given = made.results
            if self.config.batched:
                (given,), count = given, len(made.examples)
                if not isinstance(given, list) or len(given) != count:
                    what = f"{type(given).__name__} {shortened(repr(given), 80)}"
                    what = f"{len(given)} scores" if isinstance(given, list) else what
                    raise RunError(
                        f"{self.name} returned {what} for {count} responses, the first of "
                        f"{made.examples[0]}; with {self.at}.batched=true it must return a list with one "
                        f"score per response: correct the function, or set {self.at}.batched=false"
                    )
        scores = []
        for value, example in zip(given, made.examples, strict=True):
            score = math.nan if value is None and not self.alone else as_score(value)
            if score is None:
                several = isinstance(value, Sized) and not isinstance(value, str | bytes | Mapping)
                hint = f", or set {self.at}.batched=true if it takes and returns lists"
                hint = hint if several and not self.config.batched else ""
                raise RunError(
                    f"{self.name} returned {shortened(repr(value), 80)} for {example}; a score must be a "
                    f"finite number{not_a_score(value)}: correct the function{hint}"
                )
            scores.append(score)
        return made.texts.spread(scores)

    def call_all(self, rollouts: Rollouts) -> None:
        """Call the function; if it is asynchronous, also the others of its list, and wait for all results.

        An error or a signal cancels calls that have not ended.
        """
        asynchronous = [each for each in self.together if environment.asynchronous_calls(each.function)]
        several = asynchronous if self in asynchronous else [self]
        made = {each: each.calls_for(rollouts) for each in several}
        every = [(each, i) for each in several for i in range(len(made[each].results))]
        keys = [(each, i) for each, i in every if isawaitable(made[each].results[i])]
        waiting = environment.Calls(bool(keys), math.inf, in_loop=bool(keys))
        try:
            for each, i in keys:
                waiting.ask((each, i), lambda result=made[each].results[i]: result)
            while waiting.open:
                end_wait()
                for call in waiting.ended(_POLL_S):
                    each, i = call.key
                    made[each].results[i] = _items(call.result) if each.config.batched else call.result
                    if call.error is not None:
                        raise each.blamed(call.error, made[each].of_calls[i]) from call.error
        finally:
            waiting.close(0.0, ())
        for each in several:
            each.made = made[each]

    def calls_for(self, rollouts: Rollouts) -> _Made:
        """Call the function for the distinct responses; the results of an asynchronous one are awaitable.

        Raises:
            RunError: the function raised an exception, whose traceback is that of `__cause__`, or called
                `sys.exit`.
        """
        texts = scorer.distinct_texts(rollouts, self.tokenizer)
        received = self.received(rollouts, texts)
        examples = of_calls = [
            f"{rollouts.place(example)}, response {shortened(repr(response), 200)}"
            for example, response in zip(texts.examples, texts.responses, strict=True)
        ]
        if self.config.batched:
            names = dict.fromkeys(name for each in received for name in each)  # some rows lack columns
            received = [{name: [each.get(name) for each in received] for name in names}]
            of_calls = [f"{len(examples)} responses, the first of {examples[0]}"]
        results, position = [], self.parameters.position
        for values, example in zip(received, of_calls, strict=True):
            by_name = {name: values[name] for name in values if name not in position}
            try:
                given = self.function(*(values[name] for name in position), **by_name)
                results.append(_items(given) if self.config.batched and not isawaitable(given) else given)
            except (Exception, SystemExit) as error:
                raise self.blamed(error, example) from error
        return _Made(rollouts, texts, examples, of_calls, results)

    def received(self, rollouts: Rollouts, texts: scorer.DistinctTexts) -> list[dict[str, Any]]:
        """Return what the function receives for each text, by the name of its parameter.

        The values that it receives by position have the keys `prompt`, `response` and `reference`, and come
        first. The function may change messages and columns: they are copies.

        Raises:
            RunError: the function asks for messages or columns, and saved rollouts have none, or for the
                messages of saved episodes, and this run has no environment to read them.
        """
        wants = self.parameters
        for name, asked, there in (
            ("messages", wants.asks_messages, rollouts.dialogues),
            ("columns of the data", wants.asks_columns, rollouts.records),
        ):
            if asked and there is None:
                raise RunError(
                    f"{self.name} must not have parameters for {name} (these prompts have none); leave them "
                    "out"
                )
        as_messages = "completions" in wants.values and rollouts.dialogues is not None  # as TRL calls it
        episodes = [[{"role": "assistant", "content": response}] for response in texts.responses]
        if wants.asks_episode and rollouts.environment_mask is not None:
            if self.turns is None:
                raise RunError(
                    f"{self.name} asks for episode, whose messages only an environment can read, got "
                    "environment=none; set environment to that of the saved rollouts"
                )
            every, places = transcripts(rollouts, self.turns), texts.places.flatten().tolist()
            episodes = [every[places.index(m)] for m in range(len(texts.responses))]
        found = []
        for i, prompt, response, reference, episode in zip(
            texts.examples, texts.prompts, texts.responses, texts.references, episodes, strict=True
        ):
            values: dict[str, Any] = {"prompt": prompt, "response": response, "reference": reference}
            values["episode"] = episode
            if rollouts.dialogues is not None and (wants.asks_messages or as_messages):
                values["messages"] = deepcopy(rollouts.dialogues[i])
            if as_messages:
                values["prompt"] = values["messages"]
                values["response"] = [{"role": "assistant", "content": response}]
            each = {name: values[name] for name in wants.position}
            each |= {name: values[value] for name, value in wants.values.items()}
            if rollouts.records is not None and wants.asks_columns:
                record = deepcopy(rollouts.records[i])
                each |= {name: record.get(name) for name in wants.columns}
                further = record.keys() - GIVEN if wants.rest else wants.optional
                each |= {name: record[name] for name in record if name in further and name not in each}
            found.append(each)
        return found

    def blamed(self, error: BaseException, example: str) -> RunError:
        """Return the error for an exception of the function; `example` describes the responses."""
        raised = f"raised {one_line(error)}"
        did = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else raised
        takes = " (it receives lists)" if self.config.batched else ""
        where = place_in_code(error, __file__, str(environment.__file__))
        return RunError(f"{self.name} {did}{where} for {example}; correct the function{takes}")


def _items(given: Any) -> Any:
    """Return the items of a list, array, tensor or generator as a list; any other value unchanged."""
    if isinstance(given, str | bytes | Mapping | Set):  # a set has no order
        return given
    try:
        iterator = iter(given)
    except TypeError:
        return given
    return list(iterator)


# Scorers that are programs of this project: the judge of `task=tldr_mini`, and a check of answers.


class FactsScorer(scorer.TextScorer):
    """A scorer that returns the gold score of `task=tldr_mini`: facts, minus errors, filler and length."""

    config: FactsScorerConfig

    def judge(self, prompt: str, response: str, reference: str) -> float:
        """Return the gold score of the response, given the post in `prompt`; `reference` is not used."""
        return gold_score(prompt, response)


class AnswerScorer(scorer.TextScorer):
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
    found = [match[min(1, match.re.groups)] for match in re.finditer(pattern, text)]
    return found[-1] if found else None


def answer_matches(response: str, reference: str, pattern: str) -> bool:
    """Return True if the answers in `response` and `reference` are equal; False if either has no answer.

    Surrounding space, final dots, all commas and a leading dollar sign do not count. Finite numbers are
    compared as numbers, so that 5.0 == 5; other answers are compared as texts.
    """
    forms: list[str | Decimal] = []
    for text in (response, reference):
        if (answer := find_answer(text, pattern)) is None:
            return False
        bare = answer.strip().rstrip(".,").replace(",", "").removeprefix("$")
        number = Decimal(bare, Context(traps=[]))  # of another text: NaN
        forms.append(number if number.is_finite() else bare)
    return forms[0] == forms[1]


# A scorer that calls the verifiers of the package reasoning-gym.


class ReasoningGymScorer(scorer.Scorer):
    """A scorer that returns the score of the verifier; with `exact`, 1 for a full score and otherwise 0.

    A response has the score 0 if it has no answer, or if the verifier raises an exception.
    """

    config: ReasoningGymScorerConfig

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K]."""
        return self._verified(rollouts)[0]

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores [N, K], and as part `verifier_errors` 1 where the verifier raised, else 0."""
        scores, errors = self._verified(rollouts)
        return self.at_end(scores, rollouts), {"verifier_errors": errors}

    def _verified(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        assert rollouts.records is not None, "validated: the task is reasoning_gym"
        texts = scorer.distinct_texts(rollouts, self.tokenizer)
        scores, errors = [], []
        for example, response in zip(texts.examples, texts.responses, strict=True):
            record, score, error = rollouts.records[example], 0.0, 0.0
            answer = response if self.config.pattern is None else find_answer(response, self.config.pattern)
            if answer is not None:
                try:
                    verifier = _verifier(record["dataset"], record["arguments"])
                    score = float(verifier.score_answer(answer.strip(), literal_eval(record["entry"])))
                except Exception:  # some verifiers raise at an answer that they cannot read
                    error = 1.0
            scores.append(float(score >= 1) if self.config.exact else score)
            errors.append(error)
        return texts.spread(scores), texts.spread(errors)


@cache
def _verifier(dataset: str, arguments: str) -> Any:
    """Return the data set of reasoning-gym with these arguments (JSON); its entries come from the records."""
    from reasoning_gym import create_dataset  # takes seconds

    return create_dataset(dataset, seed=0, size=1, **json.loads(arguments))
