"""A scorer that asks a language model behind an OpenAI-compatible address; see docs/data-model-reward.md.

| kind | the judge sees | score of a response |
|---|---|---|
| pairwise, rank | two, or all, distinct responses to a prompt, in two orders | share of wins in its group |
| grade | one response | the grade |
| rubric | one response | sum of weight x yes, over the sum of abs(weight) |

If the two orders name different responses, the pair ties; equal texts tie without a question. Win rates give
the order of Bradley-Terry strengths if every pair of a group is judged equally often. With `opponents`, each
response meets only its neighbours in a ring, so the shares are those that Bradley-Terry expects.

Every answer is appended to a file as soon as it arrives, and is never asked for again: a server that batches
gives different answers to a question, also at temperature 0, so that a resumed run needs those that it had.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import combinations, permutations
from pathlib import Path
from string import ascii_uppercase
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from rlhf.config.scorers import RANDOM, Answer, JudgeKind, JudgeScorerConfig
from rlhf.core.batch import Prompts, Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.core.files import append, split_lines
from rlhf.core.formatting import shortened
from rlhf.core.statistics import bradley_terry
from rlhf.processes.servers import served
from rlhf.scorers.http import HttpClient
from rlhf.scorers.scorer import Figures, Scored, Scorer, ScorerContext, add, merge_ties, response_texts
from rlhf.text.chat import unquoted

_TEXTS = files("rlhf.scorers.templates")
_EXPECTED = "it must be an OpenAI-compatible server of chat completions; correct it"
_BEFORE = r"(?<![\w.,/-])(?<!/ )"  # a verdict; it finds the 8 of 8/10, and nothing of 8.5
Row = dict[str, Any]  # an answer, a line of the file of judgements


class Spent(RunError):
    """The budget of a judge is spent; the run saves a checkpoint before it stops."""


class Question(NamedTuple):
    """What a judge is shown: a prompt, responses in their order, and the reference response."""

    prompt: str
    responses: tuple[str, ...]
    reference: str = ""

    def of(self, *responses: str) -> Question:
        """Return this question with other responses."""
        return self._replace(responses=responses)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def share_of(forth: float, back: float, soft: bool = False) -> float:
    """Return the score, 0 to 1, of the first of two responses, which was shown first, then second.

    Args:
        forth: the score of the response shown first: 1, 0 or 0.5 (tie); or its probability to be better.
        back: the same for the reverse order, where the response shown first is the second one.
        soft: they are probabilities, and the result is their mean; otherwise two different verdicts tie.
    """
    share = (forth + 1 - back) / 2
    return share if soft or share in (0, 1) else 0.5


def answers_in(file: Path) -> list[Row]:
    """Return the answers in a file of judgements; a line that a crash cut off is skipped."""
    return split_lines(file, ["key", "answer", "read", "written", "end"])[0]


def price_of(rows: Iterable[Row], prices: Sequence[float]) -> float:
    """Return the price of answers, given the prices of a million tokens: read, written; none: 0."""
    read, written = prices or (0.0, 0.0)
    return sum(read * row["read"] + written * row["written"] for row in rows) / 1e6


class JudgeScorer(HttpClient, Scorer):
    """A scorer that asks a language model. Rank 0 asks for all ranks, and nothing before the first call.

    Args:
        config: config section of the scorer.
        context: the objects of the run that a scorer needs.

    Attributes:
        known: the answers, by the keys of their questions; of a key that the file has twice, the first.
        spent: price of all these answers.

    Raises:
        UserError: the environment variable with the token is not set.
    """

    config: JudgeScorerConfig
    remedies: Mapping[int, str] = {400: "set {at}.answer=text or json, or see the log of the server"}

    def __init__(self, config: JudgeScorerConfig, context: ScorerContext) -> None:
        Scorer.__init__(self, config, context)
        HttpClient.__init__(self, context.at, config, f"{(config.url or '').rstrip('/')}/chat/completions")
        self.template = config.own_template() or (_TEXTS / f"{config.kind.value}.txt").read_text("utf-8")
        self.reason = config.reason and config.answer in (Answer.json, Answer.text)
        self.template += (_TEXTS / "reason.txt").read_text("utf-8") if self.reason else ""
        self.criteria, self.lock, self.file = config.criteria(), Lock(), context.judgements
        self.known, self.figures = dict[str, Row](), Figures()
        self.used = context.used
        if self.file is not None:
            self.file = self.file.with_name(self.file.name.replace("*", self.at))
            if self.file.is_file() and not self.file.read_bytes().endswith(b"\n"):
                append(self.file, [{}])  # ends a line that a crash cut off
            for row in answers_in(self.file):
                self.known.setdefault(row["key"], row)
        self.spent = price_of(self.known.values(), config.prices)
        self.answered = config.url == RANDOM  # there is no server to try

    # -- the question ----------------------------------------------------------------------------------

    def request(self, question: Question) -> tuple[str, dict[str, Any]]:
        """Return the key of a question in the file of judgements, and the body of its request.

        The fence around the texts contains a hash of them, so that no text can close it.
        """
        config, fence, responses = self.config, f"#{_digest(question)[:12]}", question.responses
        blocks = zip(letters := ascii_uppercase[: len(responses)], responses, strict=True)
        places = {**question._asdict(), "fence": fence, "response": responses[0]} | {
            "responses": "\n\n".join(f"{fence} answer {x}\n{text}\n{fence}" for x, text in blocks),
            "criteria": "\n".join(f"{i}. {text}" for i, text in enumerate(self.criteria, 1)),
        }
        text = re.sub(r"\{(\w+)\}", lambda found: places.get(found[1], found[0]), self.template)
        request: dict[str, Any] = {"model": config.model, "messages": [{"role": "user", "content": text}]}
        request |= {"temperature": 0, "seed": 0, "max_tokens": config.max_tokens}
        verdicts, ranks = self.verdicts(letters), config.kind is JudgeKind.rank
        if config.answer is Answer.logprobs:
            request |= {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        elif config.answer is Answer.choice and config.kind is JudgeKind.rubric:
            request["structured_outputs"] = {"regex": "\n".join(f"{i}: (yes|no)" for i in verdicts)}
        elif config.answer is Answer.choice:
            orders = map(" > ".join, permutations(letters)) if ranks else next(iter(verdicts.values()))
            request["structured_outputs"] = {"choice": [*map(str, orders)]}
        elif config.answer is Answer.json:
            fields: dict[str, Any] = {name: {"enum": values} for name, values in verdicts.items()}
            if ranks:
                array = {"type": "array", "minItems": len(letters), "maxItems": len(letters)}
                fields = {"order": {**array, "items": fields["order"]}}
            fields = {"reason": {"type": "string"}, **fields} if self.reason else fields
            schema = {"type": "object", "properties": fields, "required": [*fields]}
            named = {"name": "verdict", "strict": True, "schema": {**schema, "additionalProperties": False}}
            request["response_format"] = {"type": "json_schema", "json_schema": named}
        about = config.url, config.kind.value, config.answer.value, self.template, self.criteria, request
        return _digest(about), request

    def verdicts(self, letters: str) -> dict[str, list[Any]]:
        """Return the fields of a verdict on the responses with these letters, and their possible values."""
        return {
            JudgeKind.pairwise: {"better": [*letters, "tie"]},
            JudgeKind.rank: {"order": [*letters]},
            JudgeKind.grade: {"grade": [*range(1, 11)]},
            JudgeKind.rubric: {str(i): ["yes", "no"] for i, _ in enumerate(self.criteria, 1)},
        }[self.config.kind]

    # -- the answer ------------------------------------------------------------------------------------

    def reading(self, row: Row, count: int) -> list[float] | None:
        """Return the verdict of an answer; None: there is none.

        In free text, the last match counts, because a model that thinks names all letters before. A text that
        was cut has no last match.

        Args:
            row: a line of the file of judgements.
            count: number of responses that were shown.

        Returns:
            A number for each response, higher for the better one; or for each criterion, 1 if it is met.
        """
        letters, text = ascii_uppercase[:count], row["answer"]
        verdicts, kind = self.verdicts(letters), self.config.kind
        with suppress(ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            if self.config.answer is Answer.logprobs:
                mass = [sum(math.exp(p) for token, p in row["top"] if token.strip() == x) for x in letters]
                return [each / sum(mass) for each in mass] if sum(mass) >= 0.5 else None
            if self.config.answer is Answer.json:
                verdict = json.loads(text)
                text = "\n".join(f"{name}: {verdict[name]}" for name in verdicts)
            elif row.get("end") == "length":
                return None
            if kind is JudgeKind.rubric:
                lines = [re.findall(rf"(?im)^\W*{i}\W+(yes|no)\b", text)[-1] for i in verdicts]
                return [float(each.lower() == "yes") for each in lines]
            values = "|".join(map(str, *verdicts.values()))
            found = re.findall(rf"{_BEFORE}({values})\b(?![.,]\d)", text)[-count:]
            if kind is JudgeKind.rank:
                return [-float(found.index(each)) for each in letters]
            if kind is JudgeKind.grade:
                return [float(found[-1])]
            return [0.5 if found[-1] == "tie" else float(each == found[-1]) for each in letters]
        return None

    def ask(self, key: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return the answer to a question, in one try, as a line of the file of judgements.

        Raises:
            Again: the try may be repeated.
            Spent: the budget is spent.
            RunError: the server refuses the request, or does not answer as it must.
        """
        if self.config.url is None:  # the server may have ended since the last try
            self.connect()
        budget = self.config.budget
        if budget is not None and self.spent >= budget:
            so_far = f"{self.spent:.4g} in {len(self.known):,} calls"
            raise Spent(f"{self.at}.budget={budget:g} is spent ({so_far}); raise it and run the same command")
        content, problem = self.post(request, _EXPECTED, 0, deadline)
        try:
            choice, usage = content["choices"][0], content.get("usage") or {}
            text, end = choice["message"].get("content"), choice.get("finish_reason")
            used = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self.error(f"answered with status 200 and {problem}", _EXPECTED) from None
        text = text.encode(errors="replace").decode() if isinstance(text, str) else ""
        row = {"key": key, "answer": text, "read": used[0], "written": used[1], "end": end}
        with suppress(LookupError, TypeError):
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            row["top"] = [[each["token"], each["logprob"]] for each in top]
        with self.lock:  # an earlier try, which was given up, may have had another answer
            if self.known.setdefault(key, row) is row:
                self.spent += price_of([row], self.config.prices)
                if self.file is not None:
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    append(self.file, [row])
            return self.known[key]

    def connect(self) -> None:
        """Ask the server that the run starts, from now on; raises as `served`."""
        config, log = self.config, self.file and self.file.with_suffix(".log")
        url, key = served(str(config.model), config.arguments, config.gpus, log)
        self.url, self.session.trust_env = f"{url}/chat/completions", False
        self.authorize(key)

    def post(self, question: Any, expected: str, kib: int, deadline: float) -> tuple[Any, str]:
        """Return an answer in one try, as `HttpClient.post`; with url=random, one that says nothing.

        A random order of all texts decides which response is better, in both orders of a pair; grades and
        criteria are random.
        """
        if self.config.url != RANDOM:
            return super().post(question, expected, kib, deadline)
        draw = random.Random(text := question["messages"][0]["content"])
        shown = re.findall(r"(?ms)^(#\w{12}) answer (\w)\n(.*?)\n\1$", text)
        order = [letter for _, letter, response in sorted(shown, key=lambda each: _digest(each[2]))]
        fields = {"better": order[0], "order": order} if order else {}
        verdict = {name: fields.get(name) or draw.choice(some) for name, some in self.verdicts("").items()}
        top = [{"token": letter, "logprob": 0.0} for letter in order[:1]]
        choice = {"message": {"content": json.dumps(verdict, indent=0)}}
        return {"choices": [{**choice, "logprobs": {"content": [{"top_logprobs": top}]}}]}, ""

    def readings(self, questions: Iterable[Question]) -> dict[Question, list[float] | None]:
        """Return the verdict on each distinct question, as `reading`; those without an answer are asked.

        Raises:
            UserError: an answer is missing in the file, and no judge may be asked.
            Spent: the budget is spent.
            RunError: see `HttpClient.all`, or more answers than `unreadable` are no verdict.
            Interrupted: a signal was received.
        """
        asked = {each: self.request(each) for each in questions}
        if not asked:
            return {}
        due = [pair for pair in dict(asked.values()).items() if pair[0] not in self.known]
        if due and self.used is not None:
            raise UserError(
                f"{self.at}: the file of judgements must have the answers to all {len(asked)} questions (no "
                f"judge is asked again), got none to {len(due)} of them; compare without rewards"
            )
        if due and self.config.url is None:
            self.connect()
        new = self.all(lambda i, deadline: self.ask(*due[i], deadline), len(due)) if due else []
        rows = {each: self.known[key] for each, (key, _) in asked.items()}
        if self.used is not None:
            self.used |= {row["key"]: row for row in rows.values()}
        found = {each: self.reading(row, len(each.responses)) for each, row in rows.items()}
        bad = [row for each, row in rows.items() if found[each] is None]
        config, at, count = self.config, self.at, len(rows)
        read, written = (sum(row[name] for row in new) for name in ("read", "written"))
        self.count(calls=(len(due), 0), tokens_read=(read, 0), tokens_written=(written, 0))
        self.count(cached=(count - len(due), count), unreadable=(len(bad), count))
        if config.prices:
            self.count(price=(price_of(new, config.prices), 0))
        if len(bad) > config.unreadable * count:
            example, cut = shortened(repr(bad[0]["answer"]), 80), sum(row["end"] == "length" for row in bad)
            # A weak model may fill JSON with white space until it is cut.
            ended = f"with vLLM set {at}.answer=choice, raise {at}.max_tokens, where {cut} of them ended, "
            raise RunError(
                f"{at}: {len(bad)} of {count} answers of the judge cannot be read as {config.kind.value} "
                f"with {at}.answer={config.answer.value}, such as {example}; {ended if cut else ''}choose "
                f"another {at}.answer, correct the template, or raise {at}.unreadable"
            )
        return found

    def told(self) -> Figures:
        """Return the figures since the last call; see `Scorer.told`."""
        told, self.figures = self.figures, {}
        return told

    def count(self, **new: tuple[float, float]) -> None:
        """Add to the figures `judge/<name>`: totals, and counts of which they are means, or 0 for sums."""
        add(self.figures, {f"judge/{name}": pair for name, pair in new.items()})

    # -- scores ----------------------------------------------------------------------------------------

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K]; raises as `readings`."""
        texts = response_texts(rollouts, self.tokenizer)
        return self.ranks.from_first(lambda: self.group_scores(rollouts, texts))

    def compare(self, a: Scored, b: Scored) -> Tensor:
        """Return two numbers for each prompt, [N, 2] float32; see `Scorer.compare`; raises as `readings`."""
        if not self.config.compares:
            return super().compare(a, b)
        both = zip(*(response_texts(each.rollouts, self.tokenizer) for each in (a, b)), strict=True)
        pairs = [[one[a.sample], other[b.sample]] for one, other in both]
        scores = self.ranks.from_first(lambda: self.group_scores(a.rollouts, pairs))
        return merge_ties(scores, self.tie_tolerance)

    def group_scores(self, prompts: Prompts, groups: Sequence[Sequence[str]]) -> Tensor:
        """Return the scores [N, K], float64, of K texts for each prompt; raises as `readings`."""
        texts = shown_prompts(prompts), map(tuple, groups), map(unquoted, prompts.references)
        shown = [Question(*each) for each in zip(*texts, strict=True)]
        if not self.config.compares:
            return self.single_scores([[each.of(text) for text in each.responses] for each in shown])
        asked, rings = [], list[list[Question]]()  # rings: groups in which not all responses meet
        for each in shown:
            distinct = [*dict.fromkeys(each.responses)]
            count, reach = len(distinct), (self.config.opponents or len(distinct)) / 2
            if self.config.kind is JudgeKind.rank:
                asked += [each.of(*distinct)] * (count > 1)
                continue
            pairs = [(i, j) for i, j in combinations(range(count), 2) if min(j - i, count - j + i) <= reach]
            asked += (met := [each.of(distinct[i], distinct[j]) for i, j in pairs])
            rings += [met] * (count - 1 > 2 * reach)
        shares, scores = self.shares(asked), []
        for met in rings:
            shares |= expected_shares(met, shares)
        for each in shown:
            every = ([each.of(mine, other) for other in each.responses] for mine in each.responses)
            scores.append([sum(shares.get(pair, 0.5) for pair in some) - 0.5 for some in every])  # not itself
        return torch.tensor(scores, dtype=torch.float64) / max(1, len(groups[0]) - 1)

    def shares(self, asked: Sequence[Question]) -> dict[Question, float]:
        """Return the score of the first response of each pair of responses that are shown together.

        A pair is missing, and is counted in no figure, if one of its two answers is no verdict.
        """
        reverse = {each: each.of(*each.responses[::-1]) for each in asked}
        found, shares = self.readings([*reverse, *reverse.values()]), dict[Question, float]()
        soft = self.config.answer is Answer.logprobs

        def points(of: list[float], i: int, j: int) -> float:
            return of[i] if soft else ((of[i] > of[j]) - (of[i] < of[j]) + 1) / 2

        for question in asked:
            forth, back = found[question], found[reverse[question]]
            if forth is None or back is None:
                continue
            for i, j in combinations(range(len(question.responses)), 2):
                one, other = question.responses[i], question.responses[j]
                first, second = points(forth, i, j), points(back, -1 - j, -1 - i)
                share = shares[question.of(one, other)] = share_of(first, second, soft)
                shares[question.of(other, one)] = 1 - share
                self.count(first=(first + second, 2), consistent=((first - 0.5) * (0.5 - second) > 0, 1))
                if share != 0.5 and len(one) != len(other):
                    self.count(longer=((share > 0.5) == (len(one) > len(other)), 1))
        return shares

    def single_scores(self, asked: Sequence[Sequence[Question]]) -> Tensor:
        """Return the scores [N, K] of a judge that sees one response.

        All responses to a prompt get their mean if one of the answers is no verdict, so that the prompt has
        no signal; without another verdict, the mean of all.
        """
        found = self.readings(each for group in asked for each in group)
        weights = torch.tensor([*self.criteria.values()] or [1.0], dtype=torch.float64)
        lacking = [math.nan] * len(weights)
        for verdict in filter(None, found.values() if self.criteria else ()):
            self.count(**{f"met/{number}": (met, 1) for number, met in enumerate(verdict, 1)})
        values = [[found[each] or lacking for each in group] for group in asked]
        scores = torch.tensor(values, dtype=weights.dtype) @ weights / weights.abs().sum()
        means = scores.nanmean(1, keepdim=True)
        means = torch.where(means.isnan(), scores.nanmean().nan_to_num(), means)
        return torch.where(scores.isnan().any(1, keepdim=True), means, scores)

    def trial(self, prompts: Prompts) -> tuple[str, str]:
        """Ask one question about the first of the prompts, and return it and the answer as texts.

        Raises:
            RunError: as `readings`.
        """
        reference = unquoted(prompts.references[0])
        responses = (reference or "Yes.", "This is an example of a response.")[: 1 + self.config.compares]
        question = Question(shown_prompts(prompts)[0], responses, reference)
        self.readings([question])
        key, request = self.request(question)
        return request["messages"][0]["content"], self.known[key]["answer"]


def expected_shares(met: Sequence[Question], shares: Mapping[Question, float]) -> dict[Question, float]:
    """Return the probability that the first response of each pair of a group wins, by Bradley-Terry.

    Args:
        met: the pairs that were judged. Each response met few others, of different strength.
        shares: see `JudgeScorer.shares`.
    """
    texts = [*dict.fromkeys(text for pair in met for text in pair.responses)]
    pairs = [[met[0].of(one, other) for other in texts] for one in texts]
    wins = np.array([[shares.get(pair, 0.0) for pair in row] for row in pairs])
    strengths = bradley_terry(wins)
    won = special.expit(strengths[:, None] - strengths)
    return {pair: float(won[i, j]) for i, row in enumerate(pairs) for j, pair in enumerate(row) if i != j}


def shown_prompts(prompts: Prompts) -> list[str]:
    """Return the prompts as a judge reads them: of a dialogue, each message in a line `<role>: <content>`."""
    if prompts.dialogues is None:
        return prompts.texts
    lines = ([f"{each['role']}: {each.get('content') or ''}" for each in d] for d in prompts.dialogues)
    return [*map("\n".join, lines)]
