"""The kinds of tasks: own files, preferences, chat, GSM8K, reasoning-gym, arithmetic, games, mixtures."""

from __future__ import annotations

import json
import logging
import random
import re
import string
from abc import abstractmethod
from ast import literal_eval
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash
from datasets import Dataset, Features, Json, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerFast

from rlhf.config.algorithms import Data
from rlhf.config.schema import PARTS, data_file
from rlhf.config.scorers import MixtureConfig, ReasoningGymConfig
from rlhf.config.tasks import PREFERENCE_COLUMNS, ArithmeticConfig, Difficulty, LocalConfig
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import derive
from rlhf.environments.environment import EnvironmentFactory, Example
from rlhf.environments.episodes import FIRST_MESSAGE, first_messages
from rlhf.environments.library import Calculator, GuessNumber
from rlhf.environments.tools import TOWNS, lines
from rlhf.tasks.columns import NOTHING, RECORD, TOOLS, BadRow, conversion, converted, with_all_replies
from rlhf.tasks.files import KEY, LocalFiles, Splits, different_forms
from rlhf.tasks.source import EmbeddedSource, Source, as_messages, from_rows, is_text, mapped, temporary
from rlhf.text.chat import PLAIN, set_template

if TYPE_CHECKING:
    from rlhf.tasks.columns import Message, Row, Rows, Wanted

# The task `local`: prompts, responses, dialogues or preference pairs in the user's own files.


class LocalSource(Source):
    """A source of local data, whose columns are recognised by their names or named in `task.columns`.

    Without a file for validation, a part of the training rows is the validation split. The split depends only
    on the prompts: rows with the same prompt are in the same split, whatever the seed of the run.

    Raises:
        UserError: `task.path` names no data.
    """

    config: LocalConfig

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        assert config.path is not None, "checked by the section"
        self.files = LocalFiles(config.path, config.columns, config.chat)
        self._stored = lru_cache(maxsize=4)(lambda *args: from_rows(self._rows(*args)))  # splits share a file

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `query` or `messages`, `reference_response` and `place`.

        Raises:
            UserError: the data have no such split or no prompts, or a row has another content.
        """
        return self._split(split, Data.prompts, wanted)

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `prompt`, `chosen` and `rejected`, texts or lists of messages.

        Raises:
            UserError: the data have no such split or no pairs, or a row has another content.
        """
        if self.config.preferences_path is not None:
            pairs = super().preferences(split, wanted)
            return as_messages(pairs) if self.config.chat and is_text(pairs, "prompt") else pairs
        return self._split(split, Data.preferences, wanted)

    @property
    def conversational(self) -> bool:
        """Whether the prompts of the training rows are dialogues. Only the first row is read."""
        return "messages" in self.files.first()[1]

    @property
    def splits_off_validation(self) -> bool:  # type: ignore[override]
        """Whether the validation split is a part of the training rows."""
        return self.files.stored("validation") is None

    def columns(self, data: Data) -> str:
        """Return the recognised columns of the training rows as text."""
        if data is Data.preferences and self.config.preferences_path is not None:
            return ", ".join(PREFERENCE_COLUMNS)
        return self.files.layout("train", data).described()

    def _split(self, split: str, data: Data, wanted: Wanted) -> Dataset:
        if self.files.stored(split) is not None and not (split == "train" and self.splits_off_validation):
            return self._stored(split, data, wanted)
        if split == "test":
            raise UserError(
                f"{KEY} must contain the split test, got {self.files.path} without it; add test.jsonl beside "
                "train.jsonl, or set split=validation"
            )
        rows = self._stored("train", data, wanted)
        column = next(name for name in ("query", "messages", "prompt") if name in rows.column_names)
        stored = chain.from_iterable(batch[column] for batch in rows.select_columns([column]).iter(1000))
        prompts = (each if isinstance(each, str) else json.dumps(each) for each in stored)
        held_out = held_out_rows(prompts, self.config.validation_fraction)
        if held_out.all():
            raise UserError(self.files.one_prompt())
        return rows.select(np.flatnonzero(held_out == (split == "validation")))

    def _rows(self, split: str, data: Data, wanted: Wanted) -> Rows:
        """Yield the converted rows of a stored split, each with its place."""
        name = self.files.stored(split)
        assert name is not None
        layout = self.files.layout(split, data)
        columns = wanted.read(layout.names, self.files.columns(name), str(self.files.path))
        convert = wanted.recording(layout.pair if data is Data.preferences else layout.example)
        rows = self.files.rows(name, columns)
        if self.config.all_replies and data is not Data.preferences:
            return converted(rows, lambda row: with_all_replies(convert(row)), KEY)
        return converted(rows, convert, KEY)


def held_out_rows(prompts: Iterable[str], fraction: float) -> np.ndarray:
    """Return a bool mask of the rows of the validation split: about `fraction` of all rows, at least one.

    Prompts are ordered by a hash of their text. So the choice does not depend on the order of the rows, and
    new rows move few of the others. Rows with the same prompt stay together. One prompt remains for training,
    if there are two.

    Args:
        prompts: the prompt of each row.
        fraction: share of the rows.
    """
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(prompt.encode()) for prompt in prompts), np.uint64)
    _, ranks, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    wanted = max(1, round(fraction * len(hashes)))
    chosen = int(np.searchsorted(counts.cumsum(), wanted)) + 1  # prompts that have at least `wanted` rows
    return ranks < min(chosen, max(1, len(counts) - 1))


# The task `preferences`: any data set of prompts with a chosen and a rejected response.


class PreferencesSource(Source):
    """A source of stored preference pairs.

    The prompts of the pairs are also the prompts of the task. The chosen responses are the references.
    """

    pairs_beside_prompts = True
    no_pairs = "it has no data set of its own"

    @property
    def conversational(self) -> bool:
        """Whether the prompts of the pairs are lists of messages. Of files, only one row is read."""
        pairs = self.stored_pairs()
        return pairs is not None and not is_text(pairs.load("train", PREFERENCE_COLUMNS, limit=1), "prompt")

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `query` or `messages`, `reference_response` and `rejected`."""
        pairs = self.preferences(split, wanted)
        prompt = "query" if is_text(pairs, "prompt") else "messages"
        return pairs.rename_columns({"prompt": prompt, "chosen": "reference_response"})

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `prompt`, `chosen` and `rejected` of a split; see `Source.preferences`."""
        stored = self.config.validation_split if split == "validation" else split
        return super().preferences(stored, wanted)


# The task `chat`: the last turn of a dialogue is the reference, the earlier turns are the prompt.


class ChatSource(Source):
    """A source of dialogues: lists of messages in the column `messages`, the last by the assistant."""

    no_pairs = "No Robots has none"

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` or `query`, and `reference_response`, the last turn.

        The messages are all turns except the last. If `task.turn` is set, the prompts are texts instead: each
        turn in the format `task.turn`, then `task.reply`.

        Raises:
            UserError: a dialogue has only one turn, or does not end with a turn of the assistant.
        """
        stored = self.config.validation_split if split == "validation" else split
        return self.stored_prompts().load(stored, ["messages"], wanted, self._example)

    def _example(self, row: Row) -> Row:
        try:
            made = conversion(("messages",))(row)
        except BadRow:
            made = {}
        if not made.get("reference_response"):
            raise BadRow(
                "have dialogues in its column messages (lists of role and content that end with a turn of "
                "the assistant, after another)",
                "with another form",
            )
        turn, reply = self.config.turn, self.config.reply
        if turn is None or reply is None:
            return made
        prompt = "".join(
            turn.replace("{role}", each["role"]).replace("{content}", each["content"])
            for each in made["messages"]
        )
        return {"query": prompt + reply, "reference_response": made["reference_response"][0]["content"]}


# GSM8K (Cobbe et al., 2021, arXiv 2110.14168): school problems whose answers end in `#### <number>`.


_QUESTIONS = ("question", "answer")  # columns


class GSM8KSource(Source):
    """A source of GSM8K questions in a prompt template; with `task.chat`, as messages of the user.

    The published data set has the splits `train` and `test`. The last `task.validation_size` rows of `train`
    are the validation split, and the training split ends before these rows. A local folder with a split
    `validation` is used as stored.
    """

    no_pairs = "the data set has none"

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with `query` (or `messages`) and `reference_response`, the worked answer.

        Raises:
            UserError: the split cannot be loaded, or `task.validation_size` leaves no training rows.
        """
        form = self.config.question_format

        def formatted(columns: dict[str, list[str]]) -> dict[str, list[str]]:
            prompts = [form.replace("{question}", text) for text in columns["question"]]
            return {"query": prompts, "reference_response": columns["answer"]}

        rows = self._rows(split, wanted)
        texts = mapped(rows, formatted, batched=True, remove_columns=list(_QUESTIONS))
        return as_messages(texts) if self.config.chat else texts

    def _rows(self, split: str, wanted: Wanted) -> Dataset:
        stored = self.stored_prompts(subset="main")
        if split == "test" or (stored.local and "validation" in Splits(stored.place, stored.key).files):
            return stored.load(split, _QUESTIONS, wanted)
        rows = stored.load("train", _QUESTIONS, wanted)
        if self.config.validation_size >= len(rows):
            raise UserError(
                f"task.validation_size must leave some of the {len(rows)} training rows, got "
                f"{self.config.validation_size}; set task.validation_size={len(rows) // 10}"
            )
        first = len(rows) - self.config.validation_size
        return rows.select(range(first) if split == "train" else range(first, len(rows)))


# The task `reasoning_gym`: problems of the package reasoning-gym, which generates and verifies them.
#
# In most data sets of the package, neighbouring seeds share their examples: example i of seed s + 1 is
# example i + 1 of seed s. Therefore each split has a derived seed, and training leaves out held-out
# questions.


log = logging.getLogger(__name__)


class ReasoningGymSource(EmbeddedSource):
    """A source of problems of reasoning-gym; with `task.chat`, as messages of the user.

    Each row has what the verifier needs in the columns `dataset` (its name), `arguments` (JSON) and `entry`
    (the question, the answer and the metadata, as a Python literal).
    """

    config: ReasoningGymConfig
    pattern = r"</?answer>|[\s\S]"
    words = ("<answer>", "</answer>", *string.printable, "×")  # "×": the sign of products

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with `query` (or `messages`) and `reference_response`, empty without an answer."""
        rows = super().prompts(split, wanted)
        return as_messages(rows) if self.config.chat else rows

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` examples; of the training split, those whose question no held-out example has.

        Raises:
            UserError: every training question is also held out.
        """
        rows = self._entries(split, size)
        if split == "train":
            sizes = {"validation": self.config.validation_size, "test": self.config.test_size}
            seen = {text for other in sizes.items() for text in self._entries(*other)["question"]}
            kept = [i for i, question in enumerate(rows["question"]) if question not in seen]
            if not kept:
                raise UserError(
                    "task.arguments must give more problems than the held-out examples (none is left for "
                    f"training), got {self.config.arguments}; set larger ranges"
                )
            if len(kept) < size:
                log.info("left out %d of %d training problems, which are held out", size - len(kept), size)
            rows = rows.select(kept)
        form, answers = self.config.question_format, rows["answer"]
        return {
            "query": [form.replace("{question}", question) for question in rows["question"]],
            "reference_response": [answer and f"<answer>{answer}</answer>" for answer in answers],
            "entry": list(rows["entry"]),
            "dataset": [self.config.dataset] * len(rows),
            "arguments": [json.dumps(self.config.arguments)] * len(rows),
        }

    def _entries(self, split: str, size: int) -> Dataset:
        """Return generated examples, from the cache of `datasets` if they were generated before.

        Raises:
            UserError: the data set cannot make so many problems with its arguments.
        """
        seed = derive(self.config.data_seed, "reasoning_gym", split) % 2**32
        arguments = {"name": self.config.dataset, "seed": seed, "size": size, **self.config.arguments}
        given = {"version": version("reasoning-gym"), "arguments": arguments}
        try:
            return Dataset.from_generator(_generated, gen_kwargs=given)
        except DatasetGenerationError as error:
            reason = f"{type(error.__cause__).__name__}: {error.__cause__}"
            raise UserError(
                f"task.arguments must be arguments with which {self.config.dataset} makes {size} problems "
                f"({reason}), got {self.config.arguments}; correct them"
            ) from None


def _generated(version: str, arguments: dict[str, Any]) -> Iterator[dict[str, str]]:
    from reasoning_gym import create_dataset  # takes seconds

    problems = create_dataset(**arguments)
    for i in range(arguments["size"]):
        entry = problems[i]
        try:
            literal_eval(text := repr(entry))  # keeps tuples, which some verifiers compare
        except ValueError:  # metadata with objects, which become plain as JSON
            text = repr(json.loads(json.dumps(entry)))
        answer = "" if entry["answer"] is None else entry["answer"]
        yield {"question": entry["question"], "answer": answer, "entry": text}


# The embedded task `arithmetic`: sums with answers that can be checked, similar to GSM8K.
#
#     Problem: 7 + 5 + 8
#     Solution: 7 + 5 = 12, 12 + 8 = 20 #### 20
#
# SFT imitates pupils who sometimes forget the carry, more often for larger terms: 7 + 5 = 2. After SFT, the
# policy samples correct and wrong sums; the wrong sum is more likely where most pupils are wrong. Reference
# responses are correct, and answers are compared with them.


_TERMS = {Difficulty.easy: 2, Difficulty.medium: 3, Difficulty.hard: 5}  # terms of a sum, each 1 to 9
_FORGETS_CARRY = 0.1  # times the term: probability that a carry is forgotten; 0.9 for + 9


def _numbers(largest: int) -> list[str]:
    return [f" {number}" for number in range(largest + 1)]


def _pupil_totals(terms: list[int], rng: random.Random) -> list[int]:
    """Return the running totals of a pupil who sometimes forgets the carry: 17 + 5 = 12."""

    def add(before: int, term: int) -> int:
        forgets = rng.random() < _FORGETS_CARRY * term
        return before + term - 10 * (forgets and before % 10 + term >= 10)

    return list(accumulate(terms, add))


class ArithmeticSource(EmbeddedSource):
    """A source of sums, generated from `task.data_seed`, and of preference pairs from a folder."""

    config: ArithmeticConfig
    pattern = r"\n| ?[0-9]+| ?[A-Za-z]+:| ?#+| ?[^\sA-Za-z0-9#]"
    # Operators, `####` and numbers begin with a space
    words = ("Problem:", "Solution:", "\n", " +", " =", ",", " ####", *_numbers(9 * max(_TERMS.values())))

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` examples: `reference_response` is correct, `demonstration` is the work of a pupil."""
        count = _TERMS[self.config.difficulty]
        rng = random.Random(f"arithmetic/{self.config.data_seed}/{split}")
        rows: dict[str, list[str]] = {"query": [], "reference_response": [], "demonstration": []}
        for _ in range(size):
            terms = [rng.randint(1, 9) for _ in range(count)]
            rows["query"].append(f"Problem: {' + '.join(map(str, terms))}\nSolution:")
            totals = {
                "reference_response": list(accumulate(terms)),
                "demonstration": _pupil_totals(terms, rng),
            }
            for column, own in totals.items():  # running totals, which may be wrong
                steps = zip(own[:-1], terms[1:], own[1:], strict=True)
                work = ", ".join(f"{before} + {term} = {after}" for before, term, after in steps)
                rows[column].append(f" {work} #### {own[-1]}")
        return rows


# The embedded tasks `calculator` and `guess_number`: dialogues with an environment in the plain chat format.
#
#     Problem: 7 + 5 + 8 | calc 7 + 5 | 12 | calc 12 + 8 | 20 | #### 20        Guess: 1 to 15 | 8 | higher |
#     12
#
# SFT imitates pupils, whom the environment answers. Of those with a problem, 60 % answer by head and forget
# carries as in `arithmetic`; 40 % use the calculator, and 20 % of these write another number than its result.
# Pupils who guess a number ignore the answers in half of their guesses. RL learns to calculate and to search.


_Pupil = Generator[str, str, None]  # yields replies, gets messages

_MARKS = ("<|user|>", "<|assistant|>", "\n", " error")
_PROBLEM_TERMS, _BY_HEAD, _CARELESS = 3, 0.6, 0.2
_LARGEST, _HEEDLESS = 15, 0.5


class _GameSource(EmbeddedSource):
    """A source of questions, whose rows have the number that answers them in the column `secret`."""

    pattern = r"<\|[a-z]+\|>|\n| ?[0-9]+| ?[A-Za-z]+:?| ?#+| ?[^\sA-Za-z0-9#]"
    environment: ClassVar[type[Calculator | GuessNumber]]
    replies: ClassVar[int]  # largest number in a demonstration

    @staticmethod
    @abstractmethod
    def game(rng: random.Random) -> tuple[str, str, _Pupil]:
        """Return a question, the right last reply, and a pupil."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary and the plain chat format."""
        made = super().tokenizer()
        set_template(made, PLAIN)
        return made

    def generate(self, split: str, size: int) -> dict[str, list[Any]]:
        """Return `size` examples; the demonstrations are dialogues of pupils with the environment."""
        rng = random.Random(f"{self.config.name}/{self.config.data_seed}/{split}")
        rows = [self._example(*self.game(rng)) for _ in range(size)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _example(self, question: str, right: str, pupil: _Pupil) -> dict[str, Any]:
        record, environment = {"secret": int(right.split()[-1])}, self.environment()
        environment.reset(Example(prompt=question, reference=right, record=record, seed=0, sample=0))
        talk = [_said("assistant", next(pupil))]
        for _ in range(self.replies - 1):
            if (answer := environment.step(talk[-1]["content"])).done:
                break
            talk += [_said("user", answer.message), _said("assistant", pupil.send(answer.message))]
        asked, reference = [_said("user", question)], [_said("assistant", right)]
        return {"messages": asked, "reference_response": reference, "demonstration": talk, **record}


class CalculatorSource(_GameSource):
    """A source of sums, and of pupils who add by head or with a calculator."""

    environment, replies = Calculator, _PROBLEM_TERMS
    # Numbers up to twice the largest sum
    words = (*_MARKS, "Problem:", " calc", " +", " ####", *_numbers(2 * 9 * _PROBLEM_TERMS))

    @staticmethod
    def game(rng: random.Random) -> tuple[str, str, _Pupil]:
        """Return a problem, its answer, and a pupil."""
        terms = [rng.randint(1, 9) for _ in range(_PROBLEM_TERMS)]

        def pupil() -> _Pupil:
            if rng.random() < _BY_HEAD:
                yield f" #### {_pupil_totals(terms, rng)[-1]}"
            total = f" {terms[0]}"
            for term in terms[1:]:
                total = yield f" calc{total} + {term}"
            careless = rng.random() < _CARELESS
            yield f" #### {rng.randint(_PROBLEM_TERMS, 9 * _PROBLEM_TERMS)}" if careless else f" ####{total}"

        return f"Problem: {' + '.join(map(str, terms))}", f" #### {sum(terms)}", pupil()


class GuessNumberSource(_GameSource):
    """A source of numbers, and of pupils who guess them."""

    environment, replies = GuessNumber, 4
    words = (*_MARKS, "Guess:", " to", " higher", " lower", *_numbers(_LARGEST))

    @staticmethod
    def game(rng: random.Random) -> tuple[str, str, _Pupil]:
        """Return the question, a number, and a pupil."""

        def pupil() -> _Pupil:
            low, high = 1, _LARGEST
            while True:
                heedless = rng.random() < _HEEDLESS
                guess = rng.randint(1, _LARGEST) if heedless else rng.randint(low, high)
                if (yield f" {guess}") == " higher":
                    low = max(low, guess + 1)
                else:
                    high = min(high, guess - 1)

        return f"Guess: 1 to {_LARGEST}", f" {rng.randint(1, _LARGEST)}", pupil()


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# The task `environment`: prompts that the environment of a run returns from `reset`.


class FirstMessages(Source):
    """A source of first messages, as messages of the user. The record of a row has its text and `seed`.

    Attributes:
        factory: makes the environments; set after the construction, because a task knows only its section.
    """

    factory: EnvironmentFactory

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`, which is empty.

        Raises:
            UserError: the environment fails, or `reset` returns no text.
        """
        size = getattr(self.config, f"{split}_size")
        seeds = [derive(self.config.data_seed, "first message", split, i) % 2**31 for i in range(size)]
        try:
            texts = first_messages(self.factory, seeds)
        except RunError as error:
            raise UserError(str(error)) from None
        if unfit := [text for text in texts if not isinstance(text, str) or not text.strip()]:
            raise UserError(
                f"environment must return a text from reset for task=environment (it is the prompt), got "
                f"{unfit[0]!r} from {self.factory.address}; return the first message"
            )
        made = [{"seed": seed, FIRST_MESSAGE: text} for seed, text in zip(seeds, texts, strict=True)]
        rows = {"query": texts, "reference_response": [""] * size, RECORD: [*map(wanted.record, made)]}
        return as_messages(Dataset.from_dict(rows))


# The task `lookup`: questions that need two searches in a text file and a calculation.


_LOOKUPS = data_file("rlhf.tasks", "lookup.yaml")
_INSTRUCTION = "\n\nLook the numbers up and calculate. End with a line that has only #### and the number."
_HELD_OUT = 5  # pairs of towns whose places in the file add up to a multiple are held out


class LookupSource(Source):
    """A source of questions about two lines of the file of `rlhf.environments.tools`, with answers."""

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`, such as `#### 12`."""
        rng, towns = random.Random(f"lookup/{self.config.data_seed}/{split}"), lines(TOWNS)
        rows: dict[str, list[Any]] = {"query": [], "reference_response": []}
        wanted.read([*rows], [*rows], f"task={self.config.name}")
        while len(rows["query"]) < getattr(self.config, f"{split}_size"):
            chosen = rng.sample(range(len(towns)), 2)
            if (sum(chosen) % _HELD_OUT == 0) != (split != "train"):
                continue
            question, place, signs = rng.choice(_LOOKUPS)
            numbers = [int(re.findall(r"\d+", towns[i])[place]) for i in chosen]
            answer = sum(sign * number for sign, number in zip(signs, numbers, strict=True))
            rows["query"].append(question.format(*(towns[i].split()[0] for i in chosen)) + _INSTRUCTION)
            rows["reference_response"].append(f"#### {answer}")
        return as_messages(Dataset.from_dict(rows))


# The task `mixture`: several tasks, whose training prompts are drawn in proportion to their weights.


class MixtureSource(Source):
    """A source of several tasks; the column `part` is the number of the task that a row comes from.

    The rows of the training split are those of the first task, then those of the second task, and so on;
    `Task.order` determines the order of training. In other splits, each part has about its share of the
    first rows, until its rows end.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.sources: dict[str, Source] = {}
        for name, part in config.parts.items():
            module, _, source = PARTS[type(part)].partition(":")
            self.sources[name] = getattr(import_module(module), source)(part)

    @property
    def conversational(self) -> bool:
        """Whether the prompts are dialogues.

        Raises:
            UserError: some parts have dialogues, others texts.
        """
        forms = {source.conversational: name for name, source in reversed(self.sources.items())}  # the first
        if len(forms) > 1:
            raise UserError(different_forms(forms[True], forms[False]))
        return True in forms

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `query` or `messages`, `reference_response` and `part`.

        If a part has the column `demonstration` or `place`, the result has it.

        Raises:
            UserError: the split of a part cannot be loaded, or some parts have dialogues, others texts.
        """
        prompt = "messages" if self.conversational else "query"
        return self._joined(self._loaded("prompts", split, wanted), split, [prompt, "reference_response"])

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `prompt`, `chosen`, `rejected`, `part`; `place` as in `prompts`.

        Raises:
            UserError: a part names no pairs, or its pairs cannot be loaded.
        """
        parts = self._loaded("preferences", split, wanted)
        kinds = [isinstance(part.features["prompt"], Value) for part in parts]  # texts, not dialogues
        forms = dict(zip(kinds, self.sources, strict=True))
        if len(forms) > 1:
            raise UserError(different_forms(forms[False], forms[True]))
        return self._joined(parts, split, ["prompt", "chosen", "rejected"])

    def _loaded(self, method: str, split: str, wanted: Wanted) -> list[Dataset]:
        """Return the split of each part. Errors name the keys of the part instead of those of `task`."""
        parts = []
        for name, source in self.sources.items():
            try:
                parts.append(getattr(source, method)(split, wanted.parts.get(name, NOTHING)))
            except UserError as error:
                raise UserError(*(self.config.own_key(name, text) for text in error.problems)) from None
        return parts

    def _joined(self, parts: list[Dataset], split: str, columns: list[str]) -> Dataset:
        """Return the rows of all parts with `columns` and `part`, and with others that a part has.

        The second of `columns` has the responses, which SFT imitates where a part has no demonstrations.
        """
        known = {name for part in parts for name in part.column_names}
        others = [name for name in ("demonstration", "place", RECORD, TOOLS) if name in known]
        columns = [*columns, *others]
        found = []
        for number, (name, rows) in enumerate(zip(self.sources, parts, strict=True)):
            places = [f"row {i + 1} of the split {split} of {name}" for i in range(len(rows))]
            absent = {"place": places, RECORD: ["{}"] * len(rows), TOOLS: ["null"] * len(rows)}  # JSON
            absent["demonstration"] = rows[columns[1]]
            for column in set(others) - {*rows.column_names}:
                rows = rows.add_column(column, absent[column][:])
            rows = rows.select_columns(columns)
            texts = {each for each in columns if each != TOOLS and is_text(rows, each)}
            features = Features({each: Value("string") if each in texts else Json() for each in columns})
            rows = rows if rows.features == features else rows.cast(features, **temporary(rows))
            found.append(rows.add_column("part", np.full(len(rows), number)))
        whole = concatenate_datasets(found)
        if split == "train":
            return whole
        sizes, shares = [len(rows) for rows in found], list(self.config.shares.values())
        return whole.select(interleaved(sizes, shares))


def interleaved(sizes: Sequence[int], shares: Sequence[float]) -> np.ndarray:
    """Return an order of the rows of consecutive parts; each part has about its share of the first rows.

    Args:
        sizes: number of rows of each part.
        shares: share of each part.
    """
    each = zip(sizes, shares, strict=True)
    ranks = np.concatenate([(np.arange(size) + 0.5) / share for size, share in each])
    return np.argsort(ranks, kind="stable")


def means_of_parts(
    names: Sequence[str], part: Any, values: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the means of the values of held-out prompts for each part, as metrics of an evaluation.

    Args:
        names: names of the parts.
        part: the part of each prompt, [N].
        values: name of a metric -> its value for each prompt.
    """
    numbers = np.asarray(part)
    return {
        f"eval/part/{name}/{metric}": float(np.mean(np.asarray(each, dtype=np.float64)[numbers == number]))
        for number, name in enumerate(names)
        if (numbers == number).any()
        for metric, each in values.items()
    }
