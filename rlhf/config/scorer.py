"""Settings of the scorers. The same options serve as proxy (`scorer`) and as judge (`scorer@gold`)."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from omegaconf import MISSING

from rlhf.config.address import function_problem
from rlhf.config.schema import Section, option, sections

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks
    from rlhf.scorers.scorer import Scorer


@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """What every scorer has."""

    name: str = MISSING
    missing_eos_score: float | None = None  # replaces the score of a response without end; null: leave it
    missing_eos_penalty: float | None = None  # is subtracted from that score instead; null: nothing is
    weight: float = 1.0  # of this part in a weighted scorer; 0: it is measured and changes nothing

    @property
    def reads_reward(self) -> bool:
        """Whether this needs the model that `model.reward` names."""
        return False

    def source(self, cfg: Config) -> Hashable:
        """What scores, whatever its settings: two scorers of one source are one judge."""
        return self.name

    @property
    def described(self) -> str:
        """What scores, in a word: the option, or the model or function that it names."""
        return str(getattr(self, "path", None) or getattr(self, "url", None) or self.name)

    def key(self, cfg: Config) -> str:
        """Where this is in `cfg`: `scorer`, `gold`, `scorer.parts.<name>`."""
        return next(at for at, scorer in scorers(cfg) if scorer is self)

    def problems(self, cfg: Config) -> Iterator[str]:
        """A missing end that is scored in two ways, and numbers that are none."""
        at = self.key(cfg)
        score, penalty = self.missing_eos_score, self.missing_eos_penalty
        if score is not None and penalty is not None:
            yield (
                f"{at}.missing_eos_score and {at}.missing_eos_penalty must not both be set (one replaces the "
                f"score that the other lowers), got {score:g} and {penalty:g}; "
                f"set {at}.missing_eos_score=null or {at}.missing_eos_penalty=null"
            )
        if score is not None and not math.isfinite(score):
            yield (
                f"{at}.missing_eos_score must be finite (it is the score of a response without end), "
                f"got {score:g}; set {at}.missing_eos_score=-1"
            )
        if penalty is not None and not 0 <= penalty < math.inf:
            yield (
                f"{at}.missing_eos_penalty must be >= 0 and finite (it is subtracted from the score of a "
                f"response without end), got {penalty:g}; set {at}.missing_eos_penalty=1"
            )
        if not math.isfinite(self.weight):
            yield (
                f"{at}.weight must be finite (the score is multiplied by it), got {self.weight:g}; "
                f"set {at}.weight=1"
            )
        elif self.weight != 1 and ".parts." not in at:
            yield (
                f"{at}.weight must be 1 outside of a weighted scorer (only its parts are weighed), "
                f"got {self.weight:g}; set {at}.weight=1"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """A judge that is told how to score a missing end."""
        at = self.key(cfg)
        for key in ("missing_eos_score", "missing_eos_penalty"):
            if at.startswith("gold") and (value := getattr(self, key)) is not None:
                yield f"{at}.{key}={value:g} has no effect (a judge's scores are taken as they are)"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer | None:
        """Make the scorer for rollouts in the policy's tokens; None: there is nothing to judge with."""
        raise NotImplementedError


def scorers(cfg: Config) -> Iterator[tuple[str, ScorerConfig]]:
    """Yield every scorer of the run by its key: `scorer`, `gold`, and their parts."""
    for key, section in sections(cfg):
        if isinstance(section, ScorerConfig):
            yield key, section


def choice(key: str) -> str:
    """What is typed to choose the scorer at `key`: `scorer`, `scorer@gold`, `scorer@scorer.parts.<name>`."""
    return key if key == "scorer" else f"scorer@{key}"


@option("scorer", "reward_model")
@dataclass(kw_only=True, slots=True)
class RewardModelScorerConfig(ScorerConfig):
    """A sequence-classification model with one output, read at the last response token."""

    name: str = "reward_model"
    path: str | None = None  # hub name or local folder; null: model.reward
    batch_size: int = 32  # sequences a forward

    @property
    def reads_reward(self) -> bool:
        """It does where it names no model of its own."""
        return self.path is None

    def source(self, cfg: Config) -> Hashable:
        """The model."""
        return self.name, self.path or cfg.model.reward

    def problems(self, cfg: Config) -> Iterator[str]:
        """A judge without a model."""
        yield from ScorerConfig.problems(self, cfg)
        at = self.key(cfg)
        if at.startswith("gold") and self.path is None:
            yield (
                f"{at}.path must name a reward model (the judge must not be the one that training sees), got "
                f"null; set {at}.path=<hub name or folder>"
            )

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Load the reward model, and its own tokenizer where that differs from the policy's."""
        from rlhf.scorers.reward_model import load_scorer

        return load_scorer(self, cfg, tokenizer, ranks)


@option("scorer", "facts")
@dataclass(kw_only=True, slots=True)
class FactsScorerConfig(ScorerConfig):
    """The program that judges `task=tldr_mini`: facts covered, minus errors, filler and excess length."""

    name: str = "facts"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Wrap the program."""
        from rlhf.scorers.scorer import TextScorer
        from rlhf.tasks.tldr_mini_judge import gold_score

        return TextScorer(self, lambda query, response, _: gold_score(query, response), tokenizer)


@option("scorer", "answer")
@dataclass(kw_only=True, slots=True)
class AnswerScorerConfig(ScorerConfig):
    """1 where the answer found in the response equals the one in the reference, else 0."""

    name: str = "answer"
    pattern: str = r"#### (\-?[0-9\.\,]+)"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Wrap the comparison of answers."""
        from rlhf.scorers.answers import answer_matches
        from rlhf.scorers.scorer import TextScorer

        def score(query: str, response: str, reference: str) -> float:
            return float(answer_matches(response, reference, self.pattern))

        return TextScorer(self, score, tokenizer)


@option("scorer", "labels")
@dataclass(kw_only=True, slots=True)
class LabelsScorerConfig(ScorerConfig):
    """The labels that come with stored completions."""

    name: str = "labels"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Pass the labels on."""
        from rlhf.scorers.scorer import LabelsScorer

        return LabelsScorer(self)


@option("scorer", "none")
@dataclass(kw_only=True, slots=True)
class NoScorerConfig(ScorerConfig):
    """No judge: evaluation measures what needs none. Only as `scorer@gold=none`."""

    name: str = "none"

    def problems(self, cfg: Config) -> Iterator[str]:
        """Training without a score."""
        yield from ScorerConfig.problems(self, cfg)
        if self is cfg.scorer:
            yield "scorer must be one that scores (training needs scores), got none; set scorer=reward_model"

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> None:
        """Nothing to judge with."""


@option("scorer", "weighted")
@dataclass(kw_only=True, slots=True)
class WeightedScorerConfig(ScorerConfig):
    """The sum of other scorers, each times its `weight`.

    A part is added by `+scorer@scorer.parts.<name>=<option>`, or by a defaults list as in
    conf/scorer/reward_and_answer.yaml. Its own missing-EOS settings apply to its score, ours to the sum.
    """

    name: str = "weighted"
    parts: dict[str, ScorerConfig] = field(default_factory=dict)  # by a name of the user's

    @property
    def reads_reward(self) -> bool:
        """It does where a part does."""
        return any(part.reads_reward for part in self.parts.values())

    def source(self, cfg: Config) -> Hashable:
        """Nobody else's: its parts are what can be the same as another judge."""
        return id(self)

    def problems(self, cfg: Config) -> Iterator[str]:
        """No parts, or parts that do not score by themselves."""
        yield from ScorerConfig.problems(self, cfg)
        at = self.key(cfg)
        if not self.parts:
            yield (
                f"{at}.parts must hold at least one scorer (the score is the weighted sum of theirs), "
                f"got none; set +scorer@{at}.parts.<name>=<scorer>"
            )
        for name, part in self.parts.items():
            if part.name in ("labels", "none", "weighted"):
                key = choice(f"{at}.parts.{name}")
                yield (
                    f"{key} must be a scorer that judges a text itself (the score is a sum of such), "
                    f"got {part.name}; set {key}=function"
                )

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Make every part."""
        from rlhf.scorers.weighted import WeightedScorer

        parts: dict[str, Scorer] = {}
        for name, part in self.parts.items():
            scorer = part.build(cfg, tokenizer, ranks)
            assert scorer is not None, "validated: every part scores"
            parts[name] = scorer
        return WeightedScorer(self, parts)


@option("scorer", "function")
@dataclass(kw_only=True, slots=True)
class FunctionScorerConfig(ScorerConfig):
    """A Python function of the user's: (prompt, response, reference), three texts, to a number."""

    name: str = "function"
    path: str | None = None  # <module>:<function> or <file>.py:<function>; also from the working directory
    batched: bool = False  # the function takes three lists, all of a rollout batch, and gives a list

    def source(self, cfg: Config) -> Hashable:
        """The function."""
        return self.name, self.path

    def problems(self, cfg: Config) -> Iterator[str]:
        """A module or a file that is not there; the function itself is looked for when the run starts."""
        yield from ScorerConfig.problems(self, cfg)
        if problem := function_problem(f"{self.key(cfg)}.path", self.path):
            yield problem

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Import the function."""
        from rlhf.scorers.function import FunctionScorer

        return FunctionScorer(self, self.key(cfg), tokenizer, ranks)


@option("scorer", "http")
@dataclass(kw_only=True, slots=True)
class HttpScorerConfig(ScorerConfig):
    """A service that is asked for scores; docs/rewards.md has the protocol."""

    name: str = "http"
    url: str | None = None  # where texts are posted to
    batch_size: int = 32  # responses a request
    concurrency: int = 4  # requests at once
    timeout_s: float = 60.0  # seconds without a word from the service after which a try has failed
    retries: int = 5  # more tries of a request: at once, then after 1, 2, 4, ... seconds
    token_variable: str | None = None  # environment variable with the bearer token; null: none is sent

    def source(self, cfg: Config) -> Hashable:
        """The service."""
        return self.name, self.url

    def problems(self, cfg: Config) -> Iterator[str]:
        """No address, a token that is not there, numbers out of bounds."""
        yield from ScorerConfig.problems(self, cfg)
        at = self.key(cfg)
        yield from url_problems(f"{at}.url", self.url, f"{at}.token_variable")
        if self.token_variable is not None and not os.environ.get(self.token_variable):
            yield (
                f"{at}.token_variable must name an environment variable that holds the token (it is sent to "
                f"{at}.url), got {self.token_variable!r}, which is not set; run: export "
                f"{self.token_variable}=<token>, or set {at}.token_variable=null"
            )
        for key, value, least, meaning, remedy in (
            ("batch_size", self.batch_size, 1, "responses a request", 32),
            ("concurrency", self.concurrency, 1, "requests at once", 4),
            ("retries", self.retries, 0, "more tries after the first", 5),
        ):
            if value < least:
                yield f"{at}.{key} must be >= {least} ({meaning}), got {value}; set {at}.{key}={remedy}"
        if not 0 < self.timeout_s < math.inf:
            yield (
                f"{at}.timeout_s must be > 0 and finite (seconds to wait for the service), "
                f"got {self.timeout_s:g}; set {at}.timeout_s=60"
            )

    def build(self, cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Scorer:
        """Get ready to ask; nothing is sent yet."""
        from rlhf.scorers.http import HttpScorer

        return HttpScorer(self, self.key(cfg), tokenizer, ranks)


def url_problems(key: str, url: str | None, token_key: str) -> Iterator[str]:
    """Yield what is wrong with the address of a service; `token_key` is where a secret belongs."""
    form = f"{key} must be http://<host>/<path> or https://<host>/<path> (texts are posted there)"
    try:
        parsed = urlsplit(url or "")
        whole = parsed.scheme in ("http", "https") and parsed.hostname is not None and parsed.port != 0
    except ValueError:
        whole = False
    if not whole:
        got = "null" if url is None else repr(url)
        yield f"{form}, got {got}; set {key}=http://127.0.0.1:8000/score"
    elif parsed.username is not None:
        yield (
            f"{key} must hold no user name or password (config.yaml would tell it), got one; "
            f"set {token_key}=<environment variable that holds a token>"
        )
