"""Summary of the data of a run: rows, recognised columns, lengths in tokens, skipped rows, examples."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.tasks.kinds import LocalSource
from rlhf.tasks.reading import RECORD
from rlhf.tasks.task import Counts, Lengths, Task
from rlhf.text.chat import unquoted
from rlhf.text.encoding import pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEASURED = 2000  # largest number of examples whose responses are tokenized for the summary
_EXAMPLES = 3
WIDTH = 72  # characters of a shortened example, without the arrow
_PROMPT_WIDTH = 48  # of these for the prompt, if the response is long


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the data of a run contain, as plain data.

    Attributes:
        splits: counts of each split.
        columns: the recognised columns as text; None: the task has fixed columns.
        reward_columns: names of the columns that reward functions receive.
        chat_format: the format of dialogues as text; None: the prompts are texts.
        split_off: whether the validation split is a part of the training rows.
        limit: `task.max_prompt_tokens`.
        prompts_per_update: prompts of one update.
        response_tokens: lengths of stored responses with their end token; None: there are no responses.
        measured: number of training examples whose responses were measured.
        cut: share of the measured responses that training cuts at `response_length`; 0 if it samples its own.
        response_length: `generator.response_length`.
        examples: prompt and first response of some training examples.
        altered: a sentence on measured texts that the tokenizer does not keep; None: all texts are kept.
    """

    splits: dict[str, Counts]
    columns: str | None
    reward_columns: list[str]
    chat_format: str | None
    split_off: bool
    limit: int
    prompts_per_update: int
    response_tokens: Lengths | None
    measured: int
    cut: float
    response_length: int
    examples: list[tuple[str, str]]
    altered: str | None = None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the summary as rows of a name and a value."""
        for split, counts in self.splits.items():
            value = f"{counts.kept:,} rows" + (", split off" if self.split_off and split != "train" else "")
            if counts.too_long.count:
                value += f"; {counts.too_long.count:,} skipped: prompt longer than {self.limit:,} tokens"
            if counts.no_prompt.count:
                value += f"; {counts.no_prompt.count:,} skipped: empty prompt"
            yield split, value
        if self.columns is not None:
            yield "columns", self.columns
        if self.reward_columns:
            yield "reward columns", ", ".join(self.reward_columns)
        if self.chat_format is not None:
            yield "format", self.chat_format
        yield "prompt tokens", str(self.splits["train"].prompt_tokens)
        if self.response_tokens is not None:
            yield "response tokens", str(self.response_tokens)

    def lines(self) -> list[str]:
        """Return one line for each example: the end of its prompt, and the beginning of its response."""
        return [shortened(prompt, response) for prompt, response in self.examples]

    def warnings(self) -> Iterator[str]:
        """Yield a warning if texts are not kept, or responses are cut, or a batch needs more examples."""
        train = self.splits["train"]
        if self.altered is not None:
            yield self.altered
        if self.cut:
            assert self.response_tokens is not None
            about = "" if self.measured == train.kept else "about "
            yield (
                f"{about}{self.cut:.1%} of the stored responses are longer than generator.response_length="
                f"{self.response_length} and are cut, so training sees no end for them; to keep them "
                f"whole, set generator.response_length={self.response_tokens.largest}"
            )
        if train.kept < self.prompts_per_update:
            yield (
                f"the {train.kept:,} training examples are fewer than schedule.prompts_per_update="
                f"{self.prompts_per_update:,}, so each update uses an example "
                f"{self.prompts_per_update / train.kept:.3g} times on average; for at most once, set "
                f"schedule.prompts_per_update={1 << (train.kept.bit_length() - 1)}"
            )


def summarize(task: Task, response_length: int, splits: Sequence[str] = ("train", "validation")) -> Summary:
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
    lengths = np.array([len(ids) + 1 for ids in tokens])
    source = task.source if isinstance(task.source, LocalSource) else None
    firsts = [each[0] for each in stored] if stored else some["reference"]
    form = None
    if "messages" in some:
        of_texts = source is not None and source.config.chat
        note = " for each prompt (task.chat=false turns it off)" if of_texts else ""
        form = f"chat template{note}; responses end with {task.tokenizer.eos_token}"
    return Summary(
        splits={split: task.counts(split) for split in splits},
        columns=None if source is None else source.columns(task.data),
        reward_columns=list(dict.fromkeys(chain.from_iterable(map(json.loads, some.get(RECORD, []))))),
        chat_format=form,
        split_off=source is not None and source.splits_off_validation,
        limit=task.max_prompt_tokens,
        prompts_per_update=task.prompts_per_update,
        response_tokens=Lengths.of(lengths) if texts else None,
        measured=len(some["text"]),
        cut=float((lengths > response_length).mean()) if stored else 0.0,
        response_length=response_length,
        examples=list(zip(map(unquoted, some["text"]), map(unquoted, firsts), strict=True))[:_EXAMPLES],
        altered=altered(task.tokenizer, some, "messages" in some, texts, tokens),
    )


def altered(
    tokenizer: PreTrainedTokenizerBase,
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


def shortened(prompt: str, response: str) -> str:
    """Return the end of a prompt and the beginning of a response on one line, with visible line breaks."""
    before, after = (repr(text)[1:-1] for text in (prompt, response))
    room = max(_PROMPT_WIDTH, WIDTH - len(after)) if response else WIDTH
    before = before if len(before) <= room else "..." + before[3 - room :]
    room = WIDTH - len(before)
    after = after if len(after) <= room else after[: room - 3] + "..."
    return f"{before} -> {after}" if response else before
