"""The task `local`: prompts, responses, dialogues or preference pairs in the user's own files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from datasets import Dataset

from rlhf.config.algo import Data
from rlhf.config.task import PREFERENCE_COLUMNS
from rlhf.core.errors import UserError
from rlhf.tasks.columns import converted, with_all_replies
from rlhf.tasks.local_files import KEY, LocalFiles
from rlhf.tasks.records import NOTHING, Wanted
from rlhf.tasks.source import as_messages, load_pairs, pairs_of, saved_split
from rlhf.tasks.storage import from_rows, is_text, numbered

if TYPE_CHECKING:
    from rlhf.config.task import LocalConfig
    from rlhf.tasks.reading import Row


class LocalSource:
    """A source of local data, whose columns are recognised by their names or named in `task.columns`.

    Without a file for validation, a part of the training rows is the validation split. The split depends only
    on the prompts: rows with the same prompt are in the same split, whatever the seed of the run.

    Args:
        config: config section of the task.

    Raises:
        UserError: `task.path` names no data.
    """

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        assert config.path is not None, "checked by the section"
        self.files = LocalFiles(config.path, config.columns, config.chat)
        self._stored = lru_cache(maxsize=4)(self._load)  # splits share a file

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
            pairs = load_pairs(pairs_of(self.config), split, "local", "it names none", wanted)
            return as_messages(pairs) if self.config.chat and is_text(pairs, "prompt") else pairs
        return self._split(split, Data.preferences, wanted)

    @property
    def conversational(self) -> bool:
        """Whether the prompts of the training rows are dialogues. Of files, only the first row is read."""
        return "messages" in next(self._rows("train", Data.prompts, NOTHING))[1]

    @property
    def splits_off_validation(self) -> bool:
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
        held_out = held_out_rows(_prompts_in(rows), self.config.validation_fraction)
        if held_out.all():
            raise UserError(self.files.one_prompt())
        return rows.select(np.flatnonzero(held_out == (split == "validation")))

    def _load(self, split: str, data: Data, wanted: Wanted) -> Dataset:
        return from_rows(self._rows(split, data, wanted))

    def _rows(self, split: str, data: Data, wanted: Wanted) -> Iterator[tuple[str, Row]]:
        """Yield the converted rows of a stored split, each with its place."""
        name = self.files.stored(split)
        assert name is not None
        layout = self.files.layout(split, data)
        columns = wanted.read(layout.names, self.files.columns(name), str(self.files.path))
        convert = wanted.recording(layout.pair if data is Data.preferences else layout.example)
        if self.files.saved:
            dataset = saved_split(self.files, name)
            rows = numbered(dataset, f"the split {name} of {self.files.path}", columns)
        else:
            rows = self.files.rows(name, columns)
        if self.config.all_replies and data is not Data.preferences:
            return converted(rows, lambda row: with_all_replies(convert(row)), KEY)
        return converted(rows, convert, KEY)


def _prompts_in(rows: Dataset) -> Iterator[str]:
    """Yield a text for each row that is equal for equal prompts."""
    column = next(name for name in ("query", "messages", "prompt") if name in rows.column_names)
    for batch in rows.select_columns([column]).iter(1000):
        yield from (value if isinstance(value, str) else json.dumps(value) for value in batch[column])


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
    held_out: np.ndarray = ranks < min(chosen, max(1, len(counts) - 1))
    return held_out
