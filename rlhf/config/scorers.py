"""Sections of the scorers.

The same options configure the training score (`scorer`) and the judge (`gold`).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import MISSING, OmegaConf

from rlhf.config import schema
from rlhf.config.generators import service_problems, token_problems, url_problems
from rlhf.config.models import Combine, Dtype, path_problems, paths_in
from rlhf.config.schema import Affects, Section, entry, missing_package, number, option, plain, sections
from rlhf.config.tasks import EmbeddedTaskConfig, Need, QuestionsConfig, TaskConfig
from rlhf.core.errors import one_line, setting
from rlhf.core.machine import model_names, this_machine
from rlhf.usercode.address import ONLY_HERE, function_problem, takes_lists

# Relative difference of the scores of a reward model for one response at different places of a batch.
_ROUNDING = {Dtype.float32: 1e-5, Dtype.bfloat16: 1e-2, Dtype.float16: 1e-3}
RANDOM = "random"  # `url` of a judge without a server: its verdicts are random
# conf/scorer/judge.yaml: the default with debug=tiny
OmegaConf.register_new_resolver("judge_without_server", lambda tiny: RANDOM if tiny else None, replace=True)


@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """The keys that every scorer has."""

    verifies: ClassVar[bool] = False  # the score is 1 for a correct response, else 0; its mean is an accuracy
    columns: ClassVar[frozenset[str]] = frozenset()  # columns of the task's data that the scorer reads
    reads_rewards: ClassVar[bool] = False  # the score is made of the rewards of an environment
    sequences: ClassVar[int] = 0  # per forward pass of the model that scores; 0: none of this machine does
    only_here: ClassVar[list[str]] = []  # addresses of functions that exist only in this process
    of_mixture: ClassVar[bool] = False  # True: each part scores the responses of the task's part of its name

    name: str = MISSING
    missing_eos_score: float | None = number(None, remedy="-1")
    """score of a response without EOS, in place of its own; null: its own score"""
    missing_eos_penalty: float | None = number(None, least=0, remedy="1")
    """number subtracted from the score of a response without EOS; null: nothing"""
    overlong_buffer: int | None = number(None, least=1, remedy="64", added=True)
    """last tokens of generator.response_length, each of which lowers the score; null: none does"""
    overlong_factor: float = number(1.0, when="overlong_buffer!=null", above=0, added=True)
    """number subtracted from the score of a response of the largest length"""
    weight: float = number(1.0)
    """factor of the score of this part in a weighted scorer; 0: the score is only logged"""

    # of scorers without such a key
    parts: ClassVar[dict[str, ScorerConfig]] = {}  # the scorers of which it consists, by their names

    @property
    def pad_token(self) -> str | None:
        """The pad token that replaces that of the reward model's tokenizer; None: it is not replaced."""
        return None

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return why this scorer cannot score the responses of a task; None: it can."""
        return None

    @property
    def group(self) -> tuple[float, float]:
        """The least and the most responses to a prompt that the scorer, without its parts, can score."""
        return 0, math.inf

    @property
    def compares(self) -> bool:
        """Whether the score of a response depends on the other responses to its prompt."""
        return self.group[0] > 1 or any(part.compares for part in self.parts.values())

    @property
    def reads_reward(self) -> bool:
        """Whether this scorer, or a part of it, needs the model that `model.reward` names."""
        return any(part.reads_reward for part in self.parts.values())

    def reward_models(self, at: str, reward: Any) -> list[tuple[str, str]]:
        """Return the key and the value that name each reward model which scores; none: no key names one.

        Args:
            at: the key of this section.
            reward: `model.reward` of the run.
        """
        return []

    def functions(self) -> dict[str, FunctionScorerConfig]:
        """Return a section for each function of the user, by the name of its scores in metrics."""
        return {}

    def as_sum(self, parts: Mapping[str, ScorerConfig]) -> WeightedScorerConfig:
        """Return the section of the weighted sum of the scorers `parts`, with the shared keys of this one."""
        kept = {each.name: getattr(self, each.name) for each in fields(ScorerConfig) if each.name != "name"}
        return WeightedScorerConfig(parts=dict(parts), **kept)

    def source(self, reward: Any) -> Hashable:
        """Return an identifier of the model, program or service that scores.

        Two sections with equal identifiers give the same scores, apart from weights and missing-EOS settings.

        Args:
            reward: `model.reward` of the run.
        """
        return self.name, self.described

    def rounding(self, dtype: Dtype) -> float:
        """Return the default of `algo.tie_tolerance` for scores of this scorer; 0 if its scores are exact.

        Args:
            dtype: the dtype of forward passes.
        """
        return 0.0

    @property
    def asks_service(self) -> bool:
        """Whether this scorer, or a part of it, waits for the answers of a service."""
        return any(part.asks_service for part in self.parts.values())

    @property
    def described(self) -> str:
        """The name of the scorer in messages: its model, function or address, otherwise its option."""
        named = (getattr(self, key, None) for key in ("path", "model", "url", "name"))
        found = next(filter(None, named))
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if both missing-EOS keys are set, or if a scorer that is no part has a weight."""
        score, penalty = self.missing_eos_score, self.missing_eos_penalty
        if score is not None and penalty is not None:
            rule = f"be null with {at}.missing_eos_penalty={penalty:g}"
            remedy = f"set {at}.missing_eos_score=null or {at}.missing_eos_penalty=null"
            reason = "it replaces the score that the other lowers"
            yield self.refused(at, "missing_eos_score", rule, reason, remedy=remedy)
        if math.isfinite(self.weight) and self.weight != 1 and ".parts." not in at:
            yield self.refused(at, "weight", "be 1 outside of a weighted scorer", "only parts have weights")

    def doubts(self, at: str) -> Iterator[str]:
        """Yield a warning for each key about the length of a response of a judge, where it has no effect."""
        for key in ("missing_eos_score", "missing_eos_penalty", "overlong_buffer"):
            if at.startswith("gold") and (value := getattr(self, key)) is not None:
                yield f"{at}.{key}={value:g} has no effect (the scores of a judge are not changed)"


def scorers(section: Section) -> Iterator[tuple[str, ScorerConfig]]:
    """Yield every scorer of a config with its key: `scorer`, `gold`, and the parts of both.

    Args:
        section: the root config.
    """
    for key, each in sections(section):
        if isinstance(each, ScorerConfig):
            yield key, each


@option("scorer", "reward_model", part="rlhf.scorers.scorer:build_reward_model")
class RewardModelScorerConfig(ScorerConfig):
    """A sequence-classification model with one output, read at the last response token, or several."""

    path: Any = entry(None, "hub name or local folder, or a list of these (an ensemble); null: model.reward")
    combine: Combine | None = entry(None, added=True)
    """how the scores of an ensemble become one score; null: mean"""
    doubt: float = number(0.5, when="combine=uncertainty", least=0, added=True)
    """factor of the standard deviation of the scores of an ensemble"""
    batch_size: int = number(32, "sequences per forward pass", least=1)
    pad_token: str | None = entry(None, added=True)
    """pad token of the reward model's tokenizer; null: its own, or its end token"""

    @property
    def sequences(self) -> int:  # type: ignore[override]
        """The sequences per forward pass of the reward model: `batch_size`."""
        return self.batch_size

    def reward_models(self, at: str, reward: Any) -> list[tuple[str, str]]:
        """Return each model in `path` or else in `model.reward`; none: the run makes the reward models."""
        key = "model.reward" if self.path is None else f"{at}.path"
        return [(key, each) for each in paths_in(reward if self.path is None else self.path)]

    def rounding(self, dtype: Dtype) -> float:
        """Return the relative rounding error of scores: a unit in the last place, of float32 many units."""
        return _ROUNDING[dtype]

    @property
    def reads_reward(self) -> bool:
        """Whether this scorer needs the model that `model.reward` names, because `path` is null."""
        return self.path is None

    def source(self, reward: Any) -> Hashable:
        """Return an identifier of the scorer: its models."""
        return self.name, *paths_in(self.path or reward)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if `path` names no models, or if a judge has none."""
        yield from path_problems(self, at, "path")
        if any(".py" in each for each in paths_in(self.path)):
            remedy = f"set {at}=function {setting(f'{at}.path', self.path)}"
            yield self.refused(at, "path", "name models", "functions are another scorer", remedy=remedy)
        if at.startswith("gold") and self.path is None:
            reason = "the judge must not be the model that training sees"
            yield self.refused(at, "path", "name a reward model", reason, "<hub name or folder>")


@option("scorer", "facts", part="rlhf.scorers.function:FactsScorer")
class FactsScorerConfig(ScorerConfig):
    """The program that judges `task=tldr_mini`: facts covered, minus errors, filler and excess length."""

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for every other task."""
        return None if task.name == "tldr_mini" else "that program knows only the facts of task=tldr_mini"


@option("scorer", "answer", part="rlhf.scorers.function:AnswerScorer")
class AnswerScorerConfig(ScorerConfig):
    """A score of 1 if the answer in the response equals the answer in the reference, else 0."""

    verifies: ClassVar[bool] = True

    pattern: str = entry(r"#### (\-?[0-9\.\,]+)", "regular expression whose group matches the answer")

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for a task whose references contain no answer."""
        return None if task.has_answers else "its references contain no answer to compare with"


@option("scorer", "labels", part="rlhf.scorers.scorer:LabelsScorer")
class LabelsScorerConfig(ScorerConfig):
    """The stored scores (labels) of stored completions."""


@option("scorer", "none", part="rlhf.scorers.scorer:no_scorer")
class NoScorerConfig(ScorerConfig):
    """No scorer: evaluation omits its metrics. Training needs a scorer, but no judge (`scorer@gold=none`)."""


@dataclass(kw_only=True, slots=True)
class PartsScorerConfig(ScorerConfig):
    """A scorer that consists of other scorers, its parts."""

    reason: ClassVar[str]  # why each part must judge a text by itself

    parts: dict[str, ScorerConfig] = entry(dict)  # type: ignore[misc]
    """name -> scorer; the name is chosen by the user, for scorer=mixture it is that of a part of the task"""

    def source(self, reward: Any) -> Hashable:
        """Return an identifier that no other scorer has. The parts have their own identifiers."""
        return id(self)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for each part that does not judge a text by itself."""
        for name, part in self.parts.items():
            if part.name in ("labels", "none", self.name):
                key = f"scorer@{at}.parts.{name}"
                yield (
                    f"{key} must be a scorer that judges a text by itself ({self.reason}), got {part.name}; "
                    f"set {key}=function"
                )
            elif part.compares and at.startswith("gold"):
                key, kind = f"{at}.parts.{name}", plain(getattr(part, "kind", part.name))
                yield (
                    f"{key} must score a response by itself ({self.reason}), got kind={kind}, which compares "
                    f"responses; set {key}.kind=grade"
                )


@option("scorer", "weighted", part="rlhf.scorers.scorer:WeightedScorer")
class WeightedScorerConfig(PartsScorerConfig):
    """The sum of other scorers, each times its `weight`.

    Add a part with `+scorer@scorer.parts.<name>=<option>`, or with a defaults list as in
    conf/scorer/reward_and_answer.yaml. The missing-EOS settings of a part apply to its score, the settings
    of this section apply to the sum.
    """

    reason: ClassVar[str] = "the score is a sum of such scores"

    def rounding(self, dtype: Dtype) -> float:
        """Return the weighted sum of the rounding errors of the parts."""
        return sum(abs(part.weight) * part.rounding(dtype) for part in self.parts.values())

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if there are no parts, and the errors of `PartsScorerConfig`."""
        if not self.parts:
            reason, remedy = "the score is their weighted sum", f"set +scorer@{at}.parts.<name>=<scorer>"
            yield self.refused(at, "parts", "contain at least one scorer", reason, remedy=remedy)


@option("scorer", "function", part="rlhf.scorers.function:build")
class FunctionScorerConfig(ScorerConfig):
    """A Python function of the user, or several, which take a response and return a number."""

    path: Any = entry(None)
    """<file>.py:<function> or <module>:<function>, or a list of these; the working directory is searched"""
    weights: list[float] | None = entry(None, added=True)
    """factor of the score of each function in a list; null: 1"""
    batched: bool = entry(False, "the functions take lists (of the rollout batch) and return a list")

    @property
    def paths(self) -> list[Any]:
        """The addresses of the functions; [None] if none is set."""
        return self.path if isinstance(self.path, list) else [self.path]

    @property
    def only_here(self) -> list[str]:  # type: ignore[override]
        """The addresses of functions that exist only in this process, as objects."""
        return [path for path in map(str, self.paths) if path.startswith(f"{ONLY_HERE}:")]

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The names of the arguments that the function receives by position."""
        if self.batched:
            return "prompts", "responses", "references"
        return "prompt", "response", "reference"

    def functions(self) -> dict[str, FunctionScorerConfig]:
        """Return a section for each function of a list, by the name of its scores in metrics."""
        names = [path.rpartition(":")[2] for path in self.paths]
        places = [Path(path.rpartition(":")[0]).stem.rpartition(".")[2] for path in self.paths]
        counts = Counter(names)
        both = zip(names, places, strict=True)
        names = [name if counts[name] == 1 else f"{place}_{name}" for name, place in both]
        weights = self.weights or [1.0] * len(names)
        return {
            name: FunctionScorerConfig(path=path, batched=self.batched, weight=weight)
            for name, path, weight in zip(names, self.paths, weights, strict=False)  # `rules` counts them
        }

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for each function that cannot be imported or called."""
        for path in self.paths:
            if problem := function_problem(f"{at}.path", path, self.arguments):
                yield problem
            elif (lists := takes_lists(f"{at}.path", path)) is not None and lists != self.batched:
                takes = "lists" if lists else "the text of one response"
                rule = f"be {plain(lists)} for a function that takes {takes}"
                yield self.refused(at, "batched", rule, f"see the parameters of {path}", lists)
        paths, weights = self.paths, self.weights
        if not paths:
            yield self.refused(at, "path", "name a function", "it returns the score", "my_module:my_function")
        if len(set(map(str, paths))) < len(paths):
            reason = "its scores have one name in metrics.jsonl"
            remedy = f"leave one out, or set its weight in {at}.weights"
            yield self.refused(at, "path", "name each function once", reason, remedy=remedy)
        if weights is None:
            return
        remedy = f"leave it out, or set {setting(f'{at}.path', paths)}"
        if several := isinstance(self.path, list):
            remedy = f"set '{at}.weights=[{','.join(['1'] * max(1, len(paths)))}]'"
        if not several or len(weights) != len(paths):
            rule = f"have a number for each of the {len(paths)} functions in {at}.path"
            yield self.refused(at, "weights", rule, "they are factors of its scores", remedy=remedy)
        if not all(map(math.isfinite, weights)):
            yield self.refused(at, "weights", "be finite", "scores are multiplied by them", remedy=remedy)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error for each function that this process cannot import or call."""
        found = (function_problem(f"{at}.path", path, self.arguments) for path in self.paths)
        yield from filter(None, found)


# Sections of the scorers that ask a service over HTTP, and of a teacher on a server.


@dataclass(kw_only=True, slots=True)
class ServiceScorerConfig(ScorerConfig):
    """The keys of a scorer that asks a service over HTTP."""

    asks_service: ClassVar[bool] = True
    example: ClassVar[str]  # a valid `url`
    without_server: ClassVar[tuple[str | None, ...]] = ()  # other values of `url`

    url: str | None = entry(None, "address of the service; texts are posted there")
    concurrency: int = number(4, "requests in parallel", least=1, affects=Affects.speed)
    timeout_s: float = number(60.0, above=0, affects=Affects.speed)
    """seconds until a try without a complete answer fails; longest Retry-After"""
    retries: int = number(5, least=0, affects=Affects.speed)
    """retries of a failed request: the first immediately, then after 1, 2, 4, ... s"""
    token_variable: str | None = entry(None, affects=Affects.speed)
    """environment variable with the bearer token; null: none is sent"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the address is invalid, or if the variable with the token is not set."""
        token = f"{at}.token_variable"
        if self.url not in self.without_server:
            yield from url_problems(f"{at}.url", self.url, token, "texts are posted there", self.example)
        if self.token_variable is not None:
            yield from token_problems(token, self.token_variable)


@option("scorer", "http", part="rlhf.scorers.http:HttpScorer")
class HttpScorerConfig(ServiceScorerConfig):
    """A service that returns scores over HTTP; docs/data-model-reward.md describes the protocol."""

    example: ClassVar[str] = "http://127.0.0.1:8000/score"

    batch_size: int = number(32, "responses per request", least=1)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the service accepts no connections, or the token of an empty request."""
        about = self.url or "", "start the service", f"{at}.token_variable", self.token_variable
        nothing = dict.fromkeys(("prompts", "responses", "references"), ())
        yield from service_problems(f"{at}.url", *about, body=nothing)


class JudgeKind(schema.Choice):
    """What a judge sees in one question, and what it answers."""

    pairwise = "pairwise", "two responses, in both orders: A, B or tie; the score is the share of wins"
    rank = "rank", "all responses to a prompt, in two orders: their order; the score is the share of wins"
    grade = "grade", "one response: a whole number from 1 to 10"
    rubric = "rubric", "one response: yes or no for each criterion; the score is the weighted share of yes"


class Answer(schema.Choice):
    """How a judge gives its verdict."""

    json = "json", "the server constrains the answer to a JSON schema"
    choice = "choice", "vLLM constrains the answer to the possible verdicts"
    text = "text", "free text, whose last match counts"
    logprobs = "logprobs", "the probabilities of A and B as the first token, with kind=pairwise"


@option("scorer", "judge", part="rlhf.scorers.judge:JudgeScorer")
class JudgeScorerConfig(ServiceScorerConfig):
    """A language model that judges responses, behind an OpenAI-compatible address."""

    example: ClassVar[str] = "http://127.0.0.1:8000/v1"
    without_server: ClassVar[tuple[str | None, ...]] = (None, RANDOM)

    model: str | None = entry(None)
    """name of the model at `url`; without it the hub name or folder for `vllm serve`, which the run starts"""
    arguments: dict[str, Any] = entry(dict, when="url=null", added=True)
    """arguments of that server, as +scorer.arguments={max_model_len:8192,gpu_memory_utilization:0.5}"""
    gpus: str | None = entry(None, when="url=null", affects=Affects.speed)
    """GPUs of that server, as in CUDA_VISIBLE_DEVICES"""
    kind: JudgeKind = entry(JudgeKind.pairwise)
    opponents: int | None = number(None, least=2, when="kind=pairwise", added=True)
    """other responses of its group that each response meets, an even number; null: all"""
    answer: Answer = entry(Answer.json)
    reason: bool = entry(False, "the judge writes a reason before its verdict", "answer=json|text")
    template: str | None = entry(None, "file with your text for the judge; null: the text of the kind")
    rubric: str | None = entry(None, when="kind=rubric")
    """YAML file with the criteria, `<text>: <weight>`; the weight of a fault is negative"""
    max_tokens: int = number(512, "longest answer, with the thoughts of the model", least=1)
    unreadable: float = number(0.1, least=0, most=1, affects=Affects.nothing)
    """largest share of answers of an update or an evaluation that are no verdict; above, the run stops"""
    prices: list[float] = entry(list, affects=Affects.nothing)
    """price of a million tokens: [read, written]"""
    budget: float | None = number(None, above=0, affects=Affects.nothing)
    """largest price of all sessions of the run, which then stops with a checkpoint; null: no limit"""

    @property
    def group(self) -> tuple[float, float]:
        """From 2 on, if the judge compares; it ranks at most 8 responses, and vLLM lists the orders of 5."""
        if self.kind is JudgeKind.rank:
            return 2, 5 if self.answer is Answer.choice else 8
        return 2 if self.kind is JudgeKind.pairwise else 0, math.inf

    def own_template(self) -> str | None:
        """Return the text in the file `template`; None: it is that of the kind.

        Raises:
            OSError, ValueError: the file cannot be read, or lacks a place.
        """
        if self.template is None:
            return None
        text = Path(self.template).expanduser().read_text(encoding="utf-8")
        criteria = ["{criteria}"] if self.kind is JudgeKind.rubric else []
        for place in ("{prompt}", "{responses}" if self.compares else "{response}", *criteria):
            if place not in text:
                raise ValueError(f"kind={self.kind.value} needs {place}, which it lacks")
        return text

    def criteria(self) -> dict[str, float]:
        """Return the criteria in the file `rubric`, with their weights; empty for another kind.

        Raises:
            OSError, ValueError, YAMLError: the file cannot be read, or has no criteria.
        """
        if self.kind is not JudgeKind.rubric:
            return {}
        found = yaml.safe_load(Path(self.rubric or "").expanduser().read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found:
            raise ValueError("it has no lines `<criterion>: <weight>`")
        for text, weight in found.items():
            if type(weight) not in (int, float) or not 0 < abs(weight) < math.inf:
                raise ValueError(f"the weight of {text} is no number other than 0")
        return {str(text): float(weight) for text, weight in found.items()}

    def source(self, reward: str | None) -> Hashable:
        """Return an identifier of the judge: its model, and the content of its files."""
        texts = self.own_template(), tuple(self.criteria().items())
        return self.name, self.url, self.model, self.kind, self.answer, texts

    def rounding(self, dtype: Dtype) -> float:
        """Return 0.01 for probabilities, which a server computes in 16 bits."""
        return 0.01 if self.answer is Answer.logprobs else 0.0

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for a missing model or rubric, a file that cannot be used, and wrong prices."""
        if self.model is None:
            reason, remedy = "a server may have several", f"set {at}.model=<model>"
            yield self.refused(at, "model", "name the model that judges", reason, remedy=remedy)
        if self.answer is Answer.logprobs and self.kind is not JudgeKind.pairwise:
            rule = f"not be logprobs with {at}.kind={self.kind.value}"
            yield self.refused(at, "answer", rule, "only A and B have probabilities", "json")
        if (self.opponents or 0) % 2:
            yield self.refused(at, "opponents", "be even", "half of them stand on either side in a ring", 2)
        for key, read in (("template", self.own_template), ("rubric", self.criteria)):
            try:
                read()
            except (OSError, ValueError, yaml.YAMLError) as error:
                reason = getattr(error, "strerror", None) or one_line(error)
                remedy = f"set {at}.{key}=<file>, or correct the file"
                yield self.refused(at, key, f"name a file for kind={self.kind.value}", reason, remedy=remedy)
        if len(self.prices) != 2 * bool(self.prices or self.budget) or not all(p >= 0 for p in self.prices):
            rule, remedy = "be two prices of a million tokens", f"set '{at}.prices=[0.15,0.6]'"
            yield self.refused(at, "prices", rule, "of tokens read and written", remedy=remedy)

    @property
    def described(self) -> str:
        """The name of the model, or that there is none."""
        return "random verdicts" if self.url == RANDOM else str(self.model)

    def doubts(self, at: str) -> Iterator[str]:
        """Yield a warning for random verdicts."""
        if self.url == RANDOM:
            yield f"{at}.url=random: no model judges, and verdicts are random; set {at}.url={self.example}"

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the server refuses connections or the token, or does not have the model."""
        if self.url == RANDOM:
            return
        if self.url is None:
            yield from missing_package(f"{at} without {at}.url", "vllm", "vllm", "vllm")
            if self.gpus is None and this_machine().gpus:
                rule, remedy = "name GPUs that trainer and generator leave free", f"set {at}.gpus=<numbers>"
                yield self.refused(at, "gpus", rule, "the server needs its own", remedy=remedy)
            return
        url, token = self.url.rstrip("/"), f"{at}.token_variable"
        about = url, "start the server", token, self.token_variable, "/models"
        yield from (found := [*service_problems(f"{at}.url", *about)])
        names = [] if found else model_names(f"{url}/models", os.environ.get(self.token_variable or ""))
        if names and self.model not in names:
            rule = f"be a model at {url} (it has: {', '.join(names[:10])})"
            yield self.refused(at, "model", rule, instead=names[0])


@dataclass(kw_only=True, slots=True)
class ServedTeacherConfig(Section):
    """A server of vLLM that runs the teacher, `vllm serve <model.reference>`, in place of this machine."""

    url: str | None = entry(None, "its address; null: the run loads the teacher", affects=Affects.speed)
    concurrency: int = number(16, "requests in parallel", "url!=null", least=1, affects=Affects.speed)
    timeout_s: float = number(60.0, when="url!=null", above=0, affects=Affects.speed)
    """seconds until a try without a complete answer fails; longest Retry-After"""
    retries: int = number(8, when="url!=null", least=0, affects=Affects.speed)
    """retries of a failed request: the first immediately, then after 1, 2, 4, ... s"""
    token_variable: str | None = entry(None, when="url!=null", affects=Affects.speed)
    """environment variable with the key of the server; null: none is sent"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the address is invalid, or if the variable with the key is not set."""
        key, example = f"{at}.token_variable", "http://127.0.0.1:8000"
        if self.url is not None:
            yield from url_problems(f"{at}.url", self.url, key, "a server of vLLM", example)
        if self.token_variable is not None:
            yield from token_problems(key, self.token_variable)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if the server refuses connections or the key."""
        if self.url is not None:
            about = "run: vllm serve", f"{at}.token_variable", self.token_variable, "/v1/models"
            yield from service_problems(f"{at}.url", self.url, *about)


def judges(section: Section) -> dict[str, JudgeScorerConfig]:
    """Return every judge of a config, by its key."""
    return {at: each for at, each in scorers(section) if isinstance(each, JudgeScorerConfig)}


# Sections of `task=reasoning_gym` and `scorer=reasoning_gym`.


_REFUSED = schema.data_file("rlhf.config", "reasoning_gym.yaml")


@option("task", "reasoning_gym", part="rlhf.tasks.kinds:ReasoningGymSource")
class ReasoningGymConfig(QuestionsConfig, EmbeddedTaskConfig):
    """Problems of a data set of the package reasoning-gym, which generates and verifies them."""

    chat_question: ClassVar[str] = "{question}\n\nWrite the answer between <answer> and </answer>."
    vocabulary_size: ClassVar[int] = 106
    has_answers: ClassVar[bool] = False
    reads_path: ClassVar[bool] = False

    dataset: str = entry("chain_sum", "name of the data set in reasoning-gym")
    arguments: dict[str, Any] = entry(dict, "arguments of the data set, such as {min_terms: 2, max_terms: 3}")
    chat: bool = entry(False)
    """the prompt is a message of the user, in the format of the model's chat template"""
    template: str = entry("{question}\n")
    """format of a prompt with {question}; the default with chat is an instruction"""
    train_size: int = 8192
    max_prompt_tokens: int = 256

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for a missing package, a refused data set, a `path`, or a template without field."""
        yield from missing_package("task=reasoning_gym", "reasoning_gym", "reasoning", "reasoning-gym")
        if (reason := _REFUSED.get(self.dataset)) is not None:
            yield self.refused(at, "dataset", f"not be {self.dataset}", reason)

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if reasoning-gym has no such data set, or refuses the arguments."""
        from reasoning_gym.factory import DATASETS, create_dataset  # takes seconds

        if self.dataset not in DATASETS:
            near = [*get_close_matches(self.dataset, DATASETS, n=1), "chain_sum"][0]
            yield self.refused(at, "dataset", "be in reasoning-gym", instead=near)
            return
        try:
            create_dataset(self.dataset, seed=0, size=self.train_size, **self.arguments)
        except Exception as error:  # the package checks with assert, and data sets with errors of their own
            names = {each.name for each in fields(DATASETS[self.dataset][1])} - {"seed", "size"}
            rule = f"be arguments of {self.dataset} ({', '.join(sorted(names))}) that it accepts"
            yield self.refused(at, "arguments", rule, one_line(error), remedy="correct them")


@option("scorer", "reasoning_gym", part="rlhf.scorers.function:ReasoningGymScorer")
class ReasoningGymScorerConfig(ScorerConfig):
    """The verifier of the problem in `task=reasoning_gym`."""

    verifies: ClassVar[bool] = True
    columns: ClassVar[frozenset[str]] = frozenset({"dataset", "arguments", "entry"})

    pattern: str | None = entry(r"<answer>([\s\S]*?)</answer>")
    """regular expression whose group matches the answer; null: the whole response"""
    exact: bool = entry(True, "1 for a full score of the verifier, else 0; false: its score")

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for every other task."""
        return None if task.name == "reasoning_gym" else "it verifies only problems of task=reasoning_gym"


# Sections of the task that consists of other tasks (`task=mixture`), and of its scorer.


@option("task", "mixture", part="rlhf.tasks.kinds:MixtureSource")
class MixtureConfig(TaskConfig):
    """Several tasks with weights: the prompts of each part are drawn in proportion to its weight.

    Add a part with `+schema/task@task.parts.<name>=<task>`.
    """

    own_data: ClassVar[bool] = True
    dialogues: ClassVar[None] = None  # the parts decide

    parts: dict[str, TaskConfig] = entry(dict, "name chosen by the user -> task")  # type: ignore[misc]
    weights: dict[str, float] = entry(dict, "name of a part -> weight; 1 for other parts")

    @property
    def shares(self) -> dict[str, float]:  # type: ignore[override]
        """The share of each part in the training prompts, by its name."""
        weights = {name: self.weights.get(name, 1.0) for name in self.parts}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def needs(self, pairs: bool, evaluates: bool) -> Iterator[Need]:
        """Yield the local folders that the parts read."""
        for name, part in self.parts.items():
            for key, folder, columns, splits, reason in part.needs(pairs, evaluates):
                yield self.own_key(name, key), folder, columns, splits, reason

    def own_key(self, name: str, text: str) -> str:
        """Return a text in which the keys of `task` are those of the part `name`."""
        keys = "|".join(each.name for each in fields(self.parts[name]))
        return re.sub(rf"(?<![\w/.-])task\.(?=(?:{keys})\b)", f"task.parts.{name}.", text)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for missing or nested parts, and for wrong weights."""
        if not self.parts:
            rule, remedy = "contain at least one task", f"set +schema/task@{at}.parts.<name>=<task>"
            yield self.refused(at, "parts", rule, "prompts are drawn from it", remedy=remedy)
        for name, part in self.parts.items():
            if not re.fullmatch("[a-z0-9_]+", name):
                rule = f"{at}.parts must have names of lower-case letters, digits and _"
                yield f"{rule} (metrics have these names), got {name}; rename it"
            if isinstance(part, MixtureConfig):
                rule, remedy = "not be in a mixture", f"add its parts to {at}.parts"
                reason = "its parts would have no weights"
                yield part.refused(f"{at}.parts.{name}", "name", rule, reason, remedy=remedy)
            if part.teacher_column is not None:
                yield part.refused(f"{at}.parts.{name}", "teacher_column", "be null", "other parts lack it")
        for name, weight in self.weights.items():
            if name not in self.parts:
                rule = f"{at}.weights must name parts of the mixture ({', '.join(self.parts) or 'none'})"
                remedy = f"leave it out, or add +schema/task@{at}.parts.{name}=<task>"
                yield f"{rule}, got {name}; {remedy}"
            elif not 0 < weight < math.inf:
                reason = "the share of its prompts is proportional to it"
                yield self.refused(at, f"weights.{name}", "be > 0", reason, 1)

    def doubts(self, at: str) -> Iterator[str]:
        """Yield a warning for each part with a limit of prompt tokens, which has no effect."""
        for name, part in self.parts.items():
            if part.max_prompt_tokens != type(part)().max_prompt_tokens:
                yield (
                    f"{at}.parts.{name}.max_prompt_tokens has no effect ({at}.max_prompt_tokens applies to "
                    f"all parts), got {part.max_prompt_tokens}; leave it out"
                )


@option("scorer", "mixture", part="rlhf.scorers.scorer:MixtureScorer")
class MixtureScorerConfig(PartsScorerConfig):
    """A scorer for each part of `task=mixture`, under the name of the part.

    Add a scorer with `+scorer@scorer.parts.<name>=<option>`. Each score is multiplied by its `weight`.
    The missing-EOS settings of a part apply to its score, those of this section to the weighted scores.
    """

    reason: ClassVar[str] = "each part has one"
    of_mixture: ClassVar[bool] = True

    def cannot_score(self, task: TaskConfig) -> str | None:
        """Return a reason for a task without parts."""
        return None if task.name == "mixture" else "only task=mixture has parts"

    @property
    def verifies(self) -> bool:  # type: ignore[override]
        """Whether the score is 1 for a correct response, else 0: each part verifies, with the weight 1."""
        return bool(self.parts) and all(part.verifies and part.weight == 1 for part in self.parts.values())

    def rounding(self, dtype: Dtype) -> float:
        """Return the largest rounding error of the parts."""
        return max((part.rounding(dtype) for part in self.parts.values()), default=0.0)
