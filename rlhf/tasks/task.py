"""The data of a task as tokenized batches; a run can resume at any batch."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf.config.algorithms import Data
from rlhf.core.batch import Prompts
from rlhf.core.errors import UserError
from rlhf.core.files import vocabulary
from rlhf.core.launched import derive
from rlhf.tasks.columns import before_replies
from rlhf.tasks.mixture import PromptOrder, check_parts, mixed_order
from rlhf.tasks.reading import NOTHING, RECORD, TOOLS, Wanted
from rlhf.tasks.source import is_text, mapped
from rlhf.text.chat import START, Dialogues, Messages, Tools, control_tokens, said, unquoted
from rlhf.text.encoding import end_tokens, pad_prompts, prompt_tokens

if TYPE_CHECKING:
    from rlhf.tasks.columns import Response
    from rlhf.tasks.source import Source


log = logging.getLogger(__name__)
_END_TEXTS = ("<|endoftext|>",)  # end markers in published data sets; removed with any tokenizer


class Task:
    """Training batches and held-out examples of one source.

    A split is tokenized once, at its first use. Empty prompts and prompts longer than `max_prompt_tokens` are
    skipped, and their number is logged.

    Args:
        source: the source of the texts.
        tokenizer: the tokenizer of the policy.
        data: what a training example contains.
        prompts_per_update: N, prompts of a training batch over all ranks.
        max_prompt_tokens: largest length of a prompt in tokens.
        seed: seed of the run.
        shares: share of each part of a mixture in the training examples, by its name; None: no mixture.
        wanted: the columns of the data that reward functions ask for.
        ends: tokens that end a response besides the end token of the tokenizer, because the model declares
            them. A stored response may end with one of them.
        tools: JSON schemas of the functions that replies may call, in place of those in the data.

    Raises:
        UserError: the tokenizer has no pad token.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        *,
        data: Data,
        prompts_per_update: int,
        max_prompt_tokens: int,
        seed: int,
        shares: dict[str, float] | None = None,
        wanted: Wanted = NOTHING,
        ends: Collection[str] = (),
        tools: Tools = None,
    ) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                "model.pad_token must be set for this tokenizer (it has no pad token, and prompts are "
                "padded), got null; set model.pad_token=<an unused token of its vocabulary>"
            )
        self.source = source
        self.tokenizer = tokenizer
        self.data = data
        self.prompts_per_update = prompts_per_update
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        self.shares = shares or {}
        self.wanted = wanted
        self.tools = tools
        self.ends = (tokenizer.eos_token, *_END_TEXTS, *ends)
        self.special = tuple(end_tokens(tokenizer))
        self.declared = tuple(token for token in ends if token in self.special)
        self._examples = lru_cache(maxsize=4)(self._tokenized)
        self._counts: dict[tuple[str, Data], Counts] = {}

    @cached_property
    def _train(self) -> Dataset:
        return self._examples("train", self.data)

    def __len__(self) -> int:
        """Return the number of training examples whose prompt is not too long."""
        return len(self._train)

    def fingerprint(self) -> str:
        """Return a hash (16 hex digits) of the training examples and the vocabulary.

        The hash covers row numbers, texts and completions of the examples.
        """
        digest = xxhash.xxh3_64(vocabulary(self.tokenizer.get_vocab()).encode())
        for rows in self._train.remove_columns("ids").iter(1000):  # texts and vocabulary determine the ids
            digest.update(json.dumps(rows, sort_keys=True).encode())
        return digest.hexdigest()

    def prompts(self, start: int = 0, solved_at: float | None = None) -> PromptOrder:
        """Return an endless iterator over training batches of N examples, from batch number `start` on.

        `solved_at` leaves solved examples out of later epochs; see `PromptOrder`.
        """
        return PromptOrder(self, solved_at, start, list(self.shares))

    def order(self, epoch: int) -> np.ndarray:
        """Return the positions of all training examples in the order of an epoch.

        The examples of a mixture are those of `mixed_order`: some are missing, others repeated.
        """
        if self.shares:
            return mixed_order(np.asarray(self._train["part"]), list(self.shares.values()), self.seed, epoch)
        return np.random.default_rng(derive(self.seed, "order of examples", epoch)).permutation(len(self))

    def rows(self) -> np.ndarray:
        """Return the row in the data set (`Prompts.index`) of each training example."""
        return np.asarray(self._train["index"])

    def batch(self, positions: list[int]) -> Prompts:
        """Return the training examples at `positions`."""
        return self._batch(self._train[positions])

    def held_out(
        self, count: int, split: str = "validation", data: Data | None = None, warn: bool = False
    ) -> Prompts:
        """Return the first `count` examples of a split, or all examples if the split has fewer.

        Args:
            count: number of examples.
            split: name of the split.
            data: what an example contains; None: same as a training example. For example, offline DPO trains
                on pairs, but is evaluated on `Data.prompts`.
            warn: print a warning if the split has fewer examples.
        """
        examples = self._examples(split, data or self.data)
        if warn and len(examples) < count:
            log.warning(
                "the split %s has %d examples, fewer than the requested %d", split, len(examples), count
            )
        return self._batch(examples[: min(count, len(examples))])

    def by_length(self, split: str, size: int, done: Collection[int] = ()) -> tuple[int, Iterator[Prompts]]:
        """Return the number of examples of a split, and an iterator over batches, longest examples first.

        The length of an example is the number of characters of the prompt and of its longest completion.

        Args:
            split: name of the split.
            size: largest number of examples of a batch.
            done: rows of the split to skip.
        """
        examples = self._examples(split, self.data)
        texts = zip(examples["text"], examples["completions"], strict=True)
        lengths = [len(text) + max(len("".join(each)) for each in stored) for text, stored in texts]
        rows = [i for i, row in enumerate(examples["index"]) if row not in done]
        rows.sort(key=lambda i: -lengths[i])  # too little memory then fails at the first batch
        parts = (rows[first : first + size] for first in range(0, len(rows), size))
        return len(rows), (self._batch(examples[part]) for part in parts)

    def counts(self, split: str) -> Counts:
        """Return the counts of a split, whose examples have the content of training examples."""
        self._examples(split, self.data)
        return self._counts[split, self.data]

    def examples(self, split: str) -> Dataset:
        """Return the tokenized examples of a split; see `_tokenized` for the columns.

        Raises:
            UserError: the split cannot be loaded, or has no prompt that can be used.
        """
        return self._examples(split, self.data)

    def _tokenized(self, split: str, data: Data) -> Dataset:
        """Return a tokenized split with the columns `index`, `place`, `text`, `reference` and `ids`.

        Dialogues are written by the chat template of the tokenizer; their messages are a column `messages`,
        and their tools, if any, a column `tools`. If `data` has stored completions, there is a column
        `completions`; for pairs, also a column `labels`.
        """
        pairs = data is Data.preferences
        load = self.source.preferences if pairs else self.source.prompts
        stored = load(split, self.wanted) if self.wanted else load(split)
        column = "prompt" if pairs else "messages" if "messages" in stored.column_names else "query"
        dialogues = None if is_text(stored, column) else Dialogues(self.tokenizer)
        if dialogues is not None and not self.source.conversational:
            raise UserError(
                "task must be local or preferences for pairs of dialogues (other tasks have texts), "
                f"got messages in the split {split}; set task=local or task=preferences"
            )
        if dialogues is not None and pairs:
            stored, column = stored.rename_column(column, "messages"), "messages"  # JSON, as in the result
        responses = ["chosen" if pairs else "reference_response"]
        if "rejected" in stored.column_names:
            responses.append("rejected")
            train = stored
            if dialogues is None and split != "train":
                with suppress(UserError):  # the data may have no training split, which has more rows
                    train = load("train")
            if dialogues is None:
                stored = without_repeated_prompts(stored, train, [column, *responses], split)
        empty: list[bool] = []
        equal: list[bool] = []
        control: list[bool] = []  # whether a row has control tokens in its texts
        found = control_tokens(self.tokenizer).search if dialogues is None else re.compile(START).search

        def encode(columns: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
            before = texts = columns[column]
            stored_rows = [list(row) for row in zip(*(columns[name] for name in responses), strict=True)]
            answers: list[list[Any]] = [[self._bare(each) for each in row] for row in stored_rows]
            shown = columns.get("demonstration") if data is Data.references else None
            empty.extend(not all(map(_said, row)) for row in answers)
            equal.extend(len(row) > 1 and row[0] == row[1] for row in answers)
            places = columns.get("place") or [f"row {row + 1} of the split {split}" for row in rows]
            made: dict[str, list[Any]] = {"index": rows, "place": places}
            if dialogues is not None:
                texts = [self._turns(messages) for messages in texts]
                tools = [self.tools] * len(rows) if self.tools else columns.get(TOOLS) or [None] * len(rows)
                only = data is Data.prompts
                write = partial(dialogues.write, prompt_only=only) if shown is None else dialogues.continued
                written = [write(*row) for row in zip(texts, answers, places, tools, strict=True)]
                before = heads = [head for head, _ in written]
                answers = [each for _, each in written]
                if shown is not None:
                    turns = [self._turns(messages) for messages in shown]
                    texts = list(map(before_replies, texts, turns))
                    episodes = list(map(dialogues.episode, texts, turns, places, tools))
                    heads = [head for head, _ in episodes]
                    made["completions"] = [[parts] for _, parts in episodes]
                made |= {"messages": texts} | ({TOOLS: tools} if TOOLS in columns else {})
                texts = heads
            made["text"] = texts
            made["ids"] = prompt_tokens(texts, self.tokenizer, formatted=dialogues is not None)
            made["reference"] = [row[0] for row in answers]
            made |= {name: columns[name] for name in ("part", RECORD) if name in columns}
            meant = dialogues is None and all(map(found, texts))  # all prompts have the marks of a format
            rows_of_texts = [[*row, "" if meant else text] for row, text in zip(answers, before, strict=True)]
            control.extend(any(map(found, row)) for row in rows_of_texts)
            if dialogues is None:
                trained = stored_rows if shown is None else [[text] for text in shown]
                answers = [[self._completion(each) for each in row] for row in trained]
            if pairs:
                made |= {"completions": answers, "labels": [[1.0, 0.0] for _ in texts]}
            elif data is Data.references and "completions" not in made:
                made["completions"] = [row[:1] for row in answers]
            return made

        examples = mapped(
            stored,
            encode,
            batched=True,
            with_indices=True,
            remove_columns=stored.column_names,
            desc=f"tokenize {split}",
        )
        counts, kept = Counts.of(
            examples, self.max_prompt_tokens, empty, equal, pairs or data is Data.references
        )
        self._counts[split, data] = counts
        for warning in counts.warnings(split, lambda i: examples["place"][i]):
            log.warning("%s", warning)
        if any(control):
            log.warning(
                "%d of %d rows of the split %s have control tokens in their texts, read as %s (first: %s)",
                sum(control), counts.rows, split, "such tokens" if dialogues is None else "plain text",
                examples["place"][control.index(True)],
            )  # fmt: skip
        if pairs and split == "train" and counts.no_difference.count == counts.rows:
            raise UserError(
                "task.path must contain pairs with different responses (equal ones teach nothing), got "
                f"{counts.rows:,} pairs of the split {split}, all with chosen equal to rejected; correct the "
                "columns"
            )
        for warning in [] if dialogues is None else dialogues.warnings(data is Data.prompts):
            log.warning("%s", warning)
        if not kept.any():
            raise UserError(counts.all_skipped(split, self.max_prompt_tokens))
        if split == "train" and self.shares:
            check_parts(np.asarray(examples["part"])[kept], list(self.shares), self.max_prompt_tokens)
        if counts.too_long.count:
            log.info(
                "skipped %d of %d prompts of the split %s: longer than task.max_prompt_tokens=%d",
                counts.too_long.count, counts.rows, split, self.max_prompt_tokens,
            )  # fmt: skip
        return examples if kept.all() else examples.select(np.flatnonzero(kept))

    def _bare(self, response: Response) -> Response:
        """Return a response, a text or a list of messages, without end tokens at its end."""
        return _without_end(response, self.ends) if isinstance(response, str) else self._turns(response)

    def _turns(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages; those of the assistant have no end tokens, which the template writes."""
        return [
            {**each, "content": _without_end(each["content"], self.ends)}
            if each["role"] == "assistant"
            else each
            for each in messages
        ]

    def _completion(self, stored: str) -> str:
        """Return a stored response as the text that `encode_completions` gets.

        The end token of the tokenizer is removed, because it is appended there. Another declared end token is
        kept, and takes its place. If the response ends with a special token that is no end, the end token of
        the tokenizer is written behind it.
        """
        text = _without_end(stored, self.ends)
        end = next((each for each in self.declared if stored.startswith(text + each)), "")
        return text + (end or self.tokenizer.eos_token * text.endswith(self.special))

    def _batch(self, rows: dict[str, list[Any]]) -> Prompts:
        prompt_ids, prompt_mask = pad_prompts(rows["ids"], self.tokenizer.pad_token_id)
        return Prompts(
            index=torch.tensor(rows["index"], dtype=torch.int64),
            texts=list(map(unquoted, rows["text"])),
            references=list(rows["reference"]),
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completions=list(rows["completions"]) if "completions" in rows else None,
            labels=torch.tensor(rows["labels"], dtype=torch.float32) if "labels" in rows else None,
            dialogues=list(rows["messages"]) if "messages" in rows else None,
            tools=list(rows[TOOLS]) if TOOLS in rows else None,
            part=torch.tensor(rows["part"], dtype=torch.int64) if "part" in rows else None,
            records=[json.loads(record) for record in rows[RECORD]] if RECORD in rows else None,
            places=list(rows["place"]),
        )


def _without_end(text: str, ends: tuple[str, ...]) -> str:
    """Return a text without the end tokens at its end, and without the white space behind an end token.

    Such white space belongs to the format of the next turn.
    """
    while (bare := text.rstrip()).endswith(ends):
        text = bare.removesuffix(max(filter(bare.endswith, ends), key=len))
    return text


def _said(response: Response) -> bool:
    """Return whether a response, a text or a list of messages, is not empty."""
    if isinstance(response, str):
        return bool(response.strip())
    return any(map(said, response))


# Counts of the examples of a split: skipped prompts, empty texts, equal responses, and lengths.


@dataclass(frozen=True, slots=True)
class Some:
    """A number of rows, and the first of them (from 0)."""

    count: int
    first: int | None

    @classmethod
    def where(cls, mask: np.ndarray) -> Some:
        """Return the rows where the mask is True."""
        rows = np.flatnonzero(mask)
        return cls(len(rows), int(rows[0]) if len(rows) else None)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of lengths in tokens."""

    least: int
    median: int
    most_of: int  # 95% are at most this long
    largest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        """Return the distribution of at least one length."""
        least, median, most, largest = np.quantile(lengths, [0, 0.5, 0.95, 1], method="higher")
        return cls(int(least), int(median), int(most), int(largest))

    def __str__(self) -> str:
        return f"median {self.median:,}, 95% at most {self.most_of:,}, longest {self.largest:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a split contains, before prompts are skipped.

    Attributes:
        rows: number of rows.
        too_long: rows whose prompt has more tokens than `task.max_prompt_tokens`; they are skipped.
        no_prompt: rows whose prompt is empty; they are skipped.
        prompt_tokens: lengths of all prompts.
        no_response: rows with an empty stored response, if the data have responses.
        no_difference: pairs with equal responses.
    """

    rows: int
    too_long: Some
    no_prompt: Some
    prompt_tokens: Lengths
    no_response: Some
    no_difference: Some

    @classmethod
    def of(
        cls, examples: Dataset, limit: int, empty: Sequence[bool], equal: Sequence[bool], responses: bool
    ) -> tuple[Counts, np.ndarray]:
        """Return the counts of a tokenized split, and a bool mask of the rows that are not skipped.

        Args:
            examples: the rows of the split with the columns `text` and `ids`.
            limit: largest length of a prompt in tokens.
            empty: whether a row has an empty response, for each row.
            equal: whether both responses of a pair are equal, for each row.
            responses: whether the rows must have responses; otherwise the data may be prompts only.
        """
        table = examples.data
        lengths = pc.list_value_length(table.column("ids")).to_numpy()
        no_prompt = (lengths == 0) | pc.equal(table.column("text"), "").to_numpy()
        no_response = np.asarray(empty, dtype=bool) & (responses or not all(empty))
        counts = cls(
            rows=len(examples),
            too_long=Some.where(lengths > limit),
            no_prompt=Some.where(no_prompt),
            prompt_tokens=Lengths.of(lengths),
            no_response=Some.where(no_response),
            no_difference=Some.where(np.asarray(equal)),
        )
        return counts, ~no_prompt & (lengths <= limit)

    @property
    def kept(self) -> int:
        """The number of examples that are not skipped."""
        return self.rows - self.too_long.count - self.no_prompt.count

    def warnings(self, split: str, place: Callable[[int], str]) -> Iterator[str]:
        """Yield a warning for each kind of rows that teach nothing.

        Args:
            split: name of the split.
            place: returns the place of a row for messages.
        """
        found = (
            (self.no_prompt, "an empty prompt; they are skipped"),
            (self.no_response, "an empty response; they are kept"),
            (self.no_difference, "equal chosen and rejected responses, which teach nothing; they are kept"),
        )
        for some, what in found:
            if some.first is not None:
                yield (
                    f"{some.count:,} of {self.rows:,} rows of the split {split} have {what} "
                    f"(first: {place(some.first)})"
                )

    def all_skipped(self, split: str, limit: int) -> str:
        """Return the error message for a split of which no prompt is used; `limit` as in `of`."""
        if self.no_prompt.count == self.rows:
            return (
                f"task.path must contain prompts, got {self.rows:,} rows with empty prompts in the split "
                f"{split}; fill the column of the prompts"
            )
        lengths = self.prompt_tokens
        return (
            f"task.max_prompt_tokens must be at least the length of some of the {self.rows:,} prompts of the "
            f"split {split} (longer prompts are skipped), got {limit}; the shortest prompt has "
            f"{lengths.least:,} tokens, the median is {lengths.median:,}, the longest {lengths.largest:,}; "
            f"set task.max_prompt_tokens={lengths.most_of}"
        )


# Preference pairs whose responses repeat the prompt: a property of a data set, never of a row alone.


_REPEATED = 0.9  # share of the pairs that repeat the prompt in both responses, in data that do so


def repeats(prompt: str, responses: list[str]) -> bool:
    """Return whether all responses begin with the prompt, and do not continue its last word."""
    ends = [response[len(prompt) : len(prompt) + 1] for response in responses if response.startswith(prompt)]
    whole = not prompt[-1:].isalnum() or not any(map(str.isalnum, ends))
    return bool(prompt) and whole and len(ends) == len(responses)


def without_repeated_prompts(pairs: Dataset, train: Dataset, names: list[str], split: str) -> Dataset:
    """Return pairs of texts without the prompt at the start of both responses, in data that repeat prompts.

    A part of a mixture (or data that are no mixture) repeats prompts if both responses of at least
    `_REPEATED` of its training rows begin with the prompt, and do not continue its last word. Otherwise, a
    response that begins with the prompt does so by accident.

    Args:
        pairs: the rows of the split.
        train: the rows of the training split.
        names: the columns of the prompt and of both responses.
        split: name of the split, for messages.
    """

    def rows_of(columns: Mapping[str, list]) -> Iterator[tuple]:
        return zip(columns.get("part") or repeat(0), *(columns[name] for name in names), strict=False)

    total: Counter[int] = Counter()
    found: Counter[int] = Counter()
    for columns in train.select_columns(
        [name for name in (*names, "part") if name in train.column_names]
    ).iter(1000):
        for part, prompt, *responses in rows_of(columns):
            total[part] += 1
            found[part] += repeats(prompt, responses)
    parts = {part for part in total if found[part] >= _REPEATED * total[part]}
    if not parts:
        return pairs
    changed = 0

    def cut(columns: Mapping[str, list]) -> dict[str, list[str]]:
        nonlocal changed
        made: dict[str, list[str]] = {name: [] for name in names[1:]}
        for part, prompt, *responses in rows_of(columns):
            repeated = part in parts and repeats(prompt, responses)
            changed += repeated
            for name, response in zip(made, responses, strict=True):
                made[name].append(response[len(prompt) :] if repeated else response)
        return made

    result = mapped(pairs, cut, batched=True)
    log.warning(
        "both responses of %d of %d pairs of the split %s begin with the prompt; it is removed from them",
        changed, len(pairs), split,
    )  # fmt: skip
    return result
