"""The data of a task as tokenized batches, their order, and their summary; a run can resume at any batch."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cache, partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from rlhf.config.algorithms import Data
from rlhf.core.batch import Batch, Prompts
from rlhf.core.errors import UserError
from rlhf.core.files import vocabulary
from rlhf.core.launched import derive
from rlhf.core.metrics import How, Metrics, Stat, mean
from rlhf.tasks.columns import NOTHING, RECORD, TOOLS, Response, Wanted, converted, only_prompt
from rlhf.tasks.source import Source, is_text, mapped
from rlhf.text.chat import START, Dialogues, Messages, Tools, control_tokens, end_tokens, said, unquoted
from rlhf.text.encoding import pad_prompts, pieces, prompt_tokens

log = logging.getLogger(__name__)
_END_TEXTS = ("<|endoftext|>",)  # end markers in published data sets; removed with any tokenizer


@dataclass(eq=False)
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
        shares: share of each part of a mixture in the training examples, by its name; empty: no mixture.
        wanted: the columns of the data that reward functions ask for.
        ends: tokens that end a response besides the end token of the tokenizer, because the model declares
            them. A stored response may end with one of them.
        tools: JSON schemas of the functions that replies may call, in place of those in the data.
        teacher_column: a column in `wanted` with the prompts of a teacher; None: the same prompts.

    Raises:
        UserError: the tokenizer has no pad token.
    """

    source: Source
    tokenizer: PreTrainedTokenizerFast
    _: KW_ONLY
    data: Data
    prompts_per_update: int
    max_prompt_tokens: int
    seed: int
    shares: dict[str, float] = field(default_factory=dict)
    wanted: Wanted = NOTHING
    ends: Collection[str] = ()
    tools: Tools = None
    teacher_column: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise UserError(
                "model.pad_token must be set for this tokenizer (it has no pad token, and prompts are "
                "padded), got null; set model.pad_token=<an unused token of its vocabulary>"
            )
        self.special = tuple(end_tokens(self.tokenizer))
        self.declared = tuple(token for token in self.ends if token in self.special)
        self.stripped = (self.tokenizer.eos_token, *_END_TEXTS, *self.ends)  # at the end of stored responses
        self._examples = cache(self._tokenized)
        self._counts: dict[tuple[str, Data], _Counts] = {}

    def __len__(self) -> int:
        """Return the number of training examples whose prompt is not too long."""
        return len(self.examples("train"))

    def fingerprint(self) -> str:
        """Return a hash (16 hex digits) of the training examples and the vocabulary.

        The hash covers row numbers, texts and completions of the examples.
        """
        digest = xxhash.xxh3_64(vocabulary(self.tokenizer.get_vocab()).encode())
        examples = self.examples("train").remove_columns("ids")  # texts and vocabulary determine the ids
        for rows in examples.iter(1000):
            digest.update(json.dumps(rows, sort_keys=True).encode())
        return digest.hexdigest()

    def prompts(
        self, start: int = 0, solved_at: float | None = None, pass_rate: float | None = None
    ) -> PromptOrder:
        """Return an endless iterator over training batches of N examples, from batch number `start` on.

        `solved_at` leaves solved examples out of later epochs, `pass_rate` orders them; see `PromptOrder`.
        """
        return PromptOrder(self, solved_at, start, list(self.shares), pass_rate)

    def order(self, epoch: int) -> np.ndarray:
        """Return the positions of all training examples in the order of an epoch.

        The examples of a mixture are those of `mixed_order`: some are missing, others repeated.
        """
        if self.shares:
            parts = np.asarray(self.examples("train")["part"])
            return mixed_order(parts, list(self.shares.values()), self.seed, epoch)
        return np.random.default_rng(derive(self.seed, "order of examples", epoch)).permutation(len(self))

    def rows(self) -> np.ndarray:
        """Return the row in the data set (`Prompts.index`) of each training example."""
        return np.asarray(self.examples("train")["index"])

    def batch(self, positions: list[int]) -> Prompts:
        """Return the training examples at `positions`."""
        return self._batch(self.examples("train")[positions])

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

    def counts(self, split: str) -> _Counts:
        """Return the counts of a split, whose examples have the content of training examples."""
        self.examples(split)
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
                stored = _without_repeated_prompts(stored, train, [column, *responses], split)
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
                    for i, shown_turns in enumerate(turns):
                        if len(shown_turns) > 1:  # the demonstration has the replies among these messages
                            roles = [each["role"] for each in (*texts[i], {"role": "assistant"})]
                            texts[i] = texts[i][: roles.index("assistant")]
                    episodes = list(map(dialogues.episode, texts, turns, places, tools))
                    heads = [head for head, _ in episodes]
                    made["completions"] = [[parts] for _, parts in episodes]
                made |= {"messages": texts} | ({TOOLS: tools} if TOOLS in columns else {})
                texts = heads
            if self.teacher_column is not None and not pairs:
                given = zip(places, map(json.loads, columns[RECORD]), strict=True)
                find = partial(only_prompt, column=self.teacher_column, chat=dialogues is not None)
                asked: list[Any] = [row["prompt"] for _, row in converted(given, find, "task.teacher_column")]
                if dialogues is not None:
                    say, messages = partial(dialogues.write, prompt_only=True), map(self._turns, asked)
                    asked = [head for head, _ in map(say, messages, repeat(()), places, tools)]
                made["teacher_ids"] = prompt_tokens(asked, self.tokenizer, formatted=dialogues is not None)
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
        tokens = [name for name in ("ids", "teacher_ids") if name in examples.column_names]
        sizes = [pc.list_value_length(examples.data.column(name)).to_numpy() for name in tokens]
        lengths = np.max(sizes, 0)
        no_prompt = (np.min(sizes, 0) == 0) | pc.equal(examples.data.column("text"), "").to_numpy()
        too_long = lengths > self.max_prompt_tokens
        kept = ~no_prompt & ~too_long
        must_respond = pairs or data is Data.references or not all(empty)  # else the data are prompts only
        read = "such tokens" if dialogues is None else "plain text"
        for mask, what in (
            (no_prompt, "an empty prompt; they are skipped"),
            (np.array(empty) & must_respond, "an empty response; they are kept"),
            (np.array(equal), "equal chosen and rejected responses, which teach nothing; they are kept"),
            (np.array(control), f"control tokens in their texts, read as {read}"),
        ):
            if mask.any():
                first = examples["place"][int(mask.argmax())]
                log.warning(
                    "%d of %d rows of the split %s have %s (first: %s)",
                    mask.sum(), len(mask), split, what, first,
                )  # fmt: skip
        counts = _Counts(
            rows=len(examples),
            too_long=int(too_long.sum()),
            no_prompt=int(no_prompt.sum()),
            prompt_tokens=_Lengths.of(lengths),
        )
        self._counts[split, data] = counts
        if pairs and split == "train" and all(equal):
            raise UserError(
                f"task.path must contain pairs with different responses, got {counts.rows:,} pairs of the "
                f"split {split}, all with chosen equal to rejected; correct the columns"
            )
        for warning in [] if dialogues is None else dialogues.warnings(data is Data.prompts):
            log.warning("%s", warning)
        if not kept.any():
            raise UserError(counts.all_skipped(split, self.max_prompt_tokens))
        for number, name in enumerate(self.shares if split == "train" else ()):
            if not (np.asarray(examples["part"])[kept] == number).any():
                raise UserError(
                    f"task.parts.{name} must have training prompts with 1 to {self.max_prompt_tokens} tokens "
                    "(task.max_prompt_tokens), got none; set a larger task.max_prompt_tokens, or other data"
                )
        if counts.too_long:
            log.info(
                "skipped %d of %d prompts of the split %s: longer than task.max_prompt_tokens=%d",
                counts.too_long, counts.rows, split, self.max_prompt_tokens,
            )  # fmt: skip
        return examples if kept.all() else examples.select(np.flatnonzero(kept))

    def _bare(self, response: Response) -> Response:
        """Return a response, a text or a list of messages, without end tokens at its end."""
        return _without_end(response, self.stripped) if isinstance(response, str) else self._turns(response)

    def _turns(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages; those of the assistant have no end tokens, which the template writes."""
        return [
            {**each, "content": _without_end(each["content"], self.stripped)}
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
        text = _without_end(stored, self.stripped)
        end = next((each for each in self.declared if stored.startswith(text + each)), "")
        return text + (end or self.tokenizer.eos_token * text.endswith(self.special))

    def _batch(self, rows: dict[str, list[Any]]) -> Prompts:
        prompt_ids, prompt_mask = pad_prompts(rows["ids"], self.tokenizer.pad_token_id)
        taught: Any = (ids := rows.get("teacher_ids")) and pad_prompts(ids, self.tokenizer.pad_token_id)
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
            teacher_ids=taught and taught[0],
            teacher_mask=taught and taught[1],
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


# The order in which a run draws its training examples, epoch after epoch.


def mixed_order(parts: np.ndarray, shares: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """Return the positions of the training examples that an epoch of a mixture consists of, [n] int64.

    An epoch has as many examples as all parts together, and each part has its share of them. Each part is
    drawn without repetition until all of its examples were drawn, then again in another order; this order
    continues in the next epoch.

    Args:
        parts: the part of each example, [n].
        shares: share of each part.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
    """
    counts = np.diff(np.round(np.cumsum([0, *shares]) * len(parts))).astype(np.int64)
    counts = np.maximum(counts, 1)
    counts[counts.argmax()] -= counts.sum() - len(parts)
    drawn = []
    for part, count in enumerate(counts.tolist()):
        examples = np.flatnonzero(parts == part)
        first, last = epoch * count, (epoch + 1) * count
        for turn in range(first // len(examples), -(-last // len(examples))):
            rng = np.random.default_rng(derive(seed, f"order of part {part}", turn))
            start = turn * len(examples)
            order = rng.permutation(examples)
            drawn.append(order[max(0, first - start) : last - start])
    rng = np.random.default_rng(derive(seed, "order of a mixture", epoch))
    return rng.permutation(np.concatenate(drawn))


@dataclass(eq=False)
class PromptOrder:
    """An endless iterator over the training batches of a task.

    Seed and epoch determine the order of the examples in an epoch; a batch may span two epochs. With
    `solved_at`, an epoch leaves out the examples that were solved when its first batch was drawn: the
    "no-positive-resampling" of ScaleRL (Khatri et al., arXiv 2510.13786). An example is solved if the mean
    score of its samples was at least `solved_at` when they were last scored. If all examples are solved, none
    is left out.

    With `pass_rate`, an epoch is ordered when its first batch is drawn: first the examples without a score,
    then by the distance of their last mean score to `pass_rate`, rounded to 0.1. Examples of equal distance
    keep the order that the epoch would have otherwise.

    Args:
        task: the data.
        solved_at: mean score from which on an example is solved; None: no example is left out.
        start: number of the first batch, counted from 0.
        parts: names of the parts of a mixture, for metrics of each part.
        pass_rate: mean score whose examples come first; None: the order of an epoch is random.
    """

    task: Task
    solved_at: float | None = None
    start: InitVar[int] = 0
    parts: Sequence[str] = ()
    pass_rate: float | None = None

    def __post_init__(self, start: int) -> None:
        self.solved: set[int] = set()  # examples as rows of the data set, like `Prompts.index`
        self.last: dict[int, float] = {}  # mean scores of examples, with `pass_rate`
        self.seek(start)

    def seek(self, number: int) -> None:
        """Continue with batch `number`, given that no example was left out before."""
        epoch, place = divmod(number * self.task.prompts_per_update, len(self.task))
        self.enter(epoch, place, frozenset())

    def enter(self, epoch: int, place: int, left_out: frozenset[int]) -> None:
        """Continue at position `place` of an epoch that leaves out the examples `left_out`."""
        self.epoch, self.place, self.left_out = epoch, place, left_out
        self.order = self.task.order(epoch)  # positions in the tokenized training split
        if left_out:
            kept = ~np.isin(self.task.rows()[self.order], list(left_out))
            self.order = self.order[kept] if kept.any() else self.order
        if self.pass_rate is not None:
            scores = np.array([self.last.get(row, np.nan) for row in self.task.rows()[self.order].tolist()])
            away = np.nan_to_num(np.abs(scores - self.pass_rate).round(1), nan=-1.0)
            self.order = self.order[np.argsort(away, kind="stable")]

    def __iter__(self) -> Iterator[Prompts]:
        return self

    def __next__(self) -> Prompts:
        """Return the next batch of N examples."""
        size, drawn = self.task.prompts_per_update, []  # type: int, list[int]
        while len(drawn) < size:
            if self.place == len(self.order):
                self.enter(self.epoch + 1, 0, frozenset(self.solved))
            part = self.order[self.place : self.place + size - len(drawn)].tolist()
            self.place += len(part)
            drawn += part
        return self.task.batch(drawn)

    def scored(self, batch: Batch) -> Metrics:
        """Note which examples of a scored batch are solved.

        Returns:
            The share of solved examples, if `solved_at` is set, and the metrics of each part of a mixture.
        """
        figures: Metrics = {}
        for number, name in enumerate(self.parts):
            if batch.part is None:  # stored rollouts
                break
            own = batch.part == number
            figures |= {
                f"part/{name}/prompts": Stat(float(own.sum()), 1.0, How.sum),
                f"part/{name}/scores": mean(batch.scores[own]),
                f"part/{name}/response_tokens": mean(batch.response_mask[own].sum(-1)),
                f"part/{name}/eos_rate": mean(batch.ended[own]),
            }
        if self.pass_rate is not None:
            self.last |= zip(batch.index.tolist(), batch.scores.mean(1).tolist(), strict=True)
        if self.solved_at is None:
            return figures
        solved = batch.scores.mean(1) >= self.solved_at
        self.solved.difference_update(batch.index.tolist())
        self.solved.update(batch.index[solved].tolist())
        return figures | {"prompts/solved": Stat(len(self.solved) / len(self.task), 1.0, How.last)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the solved examples, and what `pass_rate` needs, as JSON values."""
        ordered = {"order": self.order.tolist(), "last": list(self.last.items())}
        return {
            "epoch": self.epoch,
            "place": self.place,
            "left_out": sorted(self.left_out),
            "solved": sorted(self.solved),
            **(ordered if self.pass_rate is not None else {}),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.solved = set(saved["solved"])
        self.enter(saved["epoch"], saved["place"], frozenset(saved["left_out"]))
        if self.pass_rate is not None:
            self.last, self.order = dict(saved["last"]), np.array(saved["order"])


# What the data of a run contain: rows, recognised columns, lengths in tokens, skipped rows, examples.


_MEASURED = 2000  # largest number of examples whose responses are tokenized for the summary
_EXAMPLES = 3
_WIDTH = 72  # characters of a shortened example, without the arrow
_PROMPT_WIDTH = 48  # of these for the prompt, if the response is long


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The distribution of lengths in tokens."""

    least: int
    median: int
    most_of: int  # 95% are at most this long
    largest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> _Lengths:
        """Return the distribution of at least one length."""
        return cls(*map(int, np.quantile(lengths, [0, 0.5, 0.95, 1], method="higher")))

    def __str__(self) -> str:
        return f"median {self.median:,}, 95% at most {self.most_of:,}, longest {self.largest:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What a split contains, before prompts are skipped."""

    rows: int
    too_long: int  # rows whose prompt has more tokens than `task.max_prompt_tokens`; they are skipped
    no_prompt: int  # rows whose prompt is empty; they are skipped
    prompt_tokens: _Lengths  # of all prompts

    @property
    def kept(self) -> int:
        """The number of examples that are not skipped."""
        return self.rows - self.too_long - self.no_prompt

    def all_skipped(self, split: str, limit: int) -> str:
        """Return the error message for a split of which no prompt has 1 to `limit` tokens."""
        if self.no_prompt == self.rows:
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


class _Summary(NamedTuple):
    """What the data of a run contain, for readers."""

    rows: list[tuple[str, str]]  # names and values
    lines: list[str]  # some training examples: the end of the prompt, and the beginning of the response
    warnings: list[str]  # texts that the tokenizer does not keep, cut responses, too few examples


def summarize(task: Task, response_length: int, splits: Sequence[str] = ("train", "validation")) -> _Summary:
    """Return the summary of the data of a run.

    Args:
        task: the data of the run.
        response_length: `generator.response_length`.
        splits: the splits that the run reads; `train` must be one of them.

    Raises:
        UserError: a split cannot be loaded, or has no prompt that can be used.
    """
    train = task.examples("train")
    some = train[np.linspace(0, len(train) - 1, min(len(train), _MEASURED)).astype(int)]
    stored = [["".join(each) for each in row] for row in some.get("completions", [])]
    responses = stored or [[text] if text else [] for text in some["reference"]]
    texts = list(chain.from_iterable(responses))
    before = [text for text, row in zip(some["text"], responses, strict=True) for _ in row]
    tokens = pieces(task.tokenizer).encode(texts, before)
    lengths = np.array([len(ids) + 1 for ids in tokens])  # with the end token
    columns = task.source.columns(task.data)
    records = dict.fromkeys(chain.from_iterable(map(json.loads, some.get(RECORD, []))))

    rows: list[tuple[str, str]] = []
    for split in splits:
        counts = task.counts(split)
        off = split != "train" and task.source.splits_off_validation
        value = f"{counts.kept:,} rows" + ", split off" * off
        if counts.too_long:
            limit = f"{task.max_prompt_tokens:,}"
            value += f"; {counts.too_long:,} skipped: prompt longer than {limit} tokens"
        if counts.no_prompt:
            value += f"; {counts.no_prompt:,} skipped: empty prompt"
        rows.append((split, value))
    if columns is not None:
        rows.append(("columns", columns))
    if records:
        rows.append(("reward columns", ", ".join(records)))
    if "messages" in some:
        of_texts = columns is not None and task.source.config.chat
        note = " for each prompt (task.chat=false turns it off)" if of_texts else ""
        rows.append(("format", f"chat template{note}; responses end with {task.tokenizer.eos_token}"))
    rows.append(("prompt tokens", str(task.counts("train").prompt_tokens)))
    if texts:
        rows.append(("response tokens", str(_Lengths.of(lengths))))

    warnings, kept, size = [], task.counts("train").kept, task.prompts_per_update
    if changed := altered(task.tokenizer, some, "messages" in some, texts, tokens):
        warnings.append(changed)
    cut = float((lengths > response_length).mean()) if stored else 0.0  # a policy samples its own responses
    if cut:
        about = "" if len(some["text"]) == kept else "about "
        warnings.append(
            f"{about}{cut:.1%} of the stored responses are longer than generator.response_length="
            f"{response_length} and are cut, so training sees no end for them; to keep them "
            f"whole, set generator.response_length={lengths.max()}"
        )
    if kept < size:
        warnings.append(
            f"the {kept:,} training examples are fewer than schedule.prompts_per_update={size:,}, so each "
            f"update uses an example {size / kept:.3g} times on average; for at most once, set "
            f"schedule.prompts_per_update={1 << (kept.bit_length() - 1)}"
        )
    firsts = [each[0] for each in stored] if stored else some["reference"]
    examples = zip(map(unquoted, some["text"][:_EXAMPLES]), map(unquoted, firsts), strict=False)
    return _Summary(rows, [_shortened(*each) for each in examples], warnings)


def altered(
    tokenizer: PreTrainedTokenizerFast,
    prompts: dict[str, list[Any]],
    formatted: bool,
    texts: list[str],
    tokens: list[list[int]],
) -> str | None:
    """Return a sentence on the prompts and responses whose tokens read as another text; None: there are none.

    Spaces beside special tokens do not count, because tokenizers of the Llama 2 kind insert some.

    Args:
        tokenizer: the tokenizer.
        prompts: examples with the columns `text` and `ids`.
        formatted: whether a chat template wrote the prompts.
        texts: responses.
        tokens: their tokens.
    """
    special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)) or "(?!)")

    def plain(text: str) -> str:
        return re.sub(r"\s", "", special.sub("", text)) if formatted else special.sub("", text).lstrip()

    read = tokenizer.batch_decode(prompts["ids"], clean_up_tokenization_spaces=False)
    pairs = zip(map(unquoted, prompts["text"]), read, strict=True)
    found = [each for each in pairs if plain(each[0]) != plain(each[1])]
    pairs = zip(map(unquoted, texts), map(pieces(tokenizer).read, tokens), strict=True)
    found += [each for each in pairs if each[0] != each[1]]
    if not found:
        return None
    start = max(0, len(os.path.commonprefix(found[0])) - _PROMPT_WIDTH // 2)
    text, other = (repr(each[start : start + _PROMPT_WIDTH]) for each in found[0])
    return (
        f"the tokenizer changes {len(found):,} of {len(read) + len(texts):,} measured prompts and responses; "
        f"in the first, {text} becomes {other}"
    )


def _shortened(prompt: str, response: str) -> str:
    """Return the end of a prompt and the beginning of a response on one line, with visible line breaks."""
    before, after = (repr(text)[1:-1] for text in (prompt, response))
    room = max(_PROMPT_WIDTH, _WIDTH - len(after)) if response else _WIDTH
    before = before if len(before) <= room else "..." + before[3 - room :]
    room = _WIDTH - len(before)
    after = after if len(after) <= room else after[: room - 3] + "..."
    return f"{before} -> {after}" if response else before


# Preference pairs whose responses repeat the prompt: a property of a data set, never of a row alone.


_REPEATED = 0.9  # share of the pairs that repeat the prompt in both responses, in data that do so


def repeats(prompt: str, responses: list[str]) -> bool:
    """Return whether all responses begin with the prompt, and do not continue its last word."""
    ends = [response[len(prompt) : len(prompt) + 1] for response in responses if response.startswith(prompt)]
    whole = not prompt[-1:].isalnum() or not any(map(str.isalnum, ends))
    return bool(prompt) and whole and len(ends) == len(responses)


def _without_repeated_prompts(pairs: Dataset, train: Dataset, names: list[str], split: str) -> Dataset:
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

    found = defaultdict[Any, list[bool]](list)  # part -> whether each of its rows repeats the prompt
    for columns in train.select_columns(
        [name for name in (*names, "part") if name in train.column_names]
    ).iter(1000):
        for part, prompt, *responses in rows_of(columns):
            found[part].append(repeats(prompt, responses))
    parts = {part for part, rows in found.items() if sum(rows) >= _REPEATED * len(rows)}
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
