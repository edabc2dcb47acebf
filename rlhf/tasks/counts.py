"""Counts of the examples of a split: skipped prompts, empty texts, equal responses, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset


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


def count(
    examples: Dataset, limit: int, empty: Sequence[bool], equal: Sequence[bool], has_responses: bool
) -> tuple[Counts, np.ndarray]:
    """Return the counts of a tokenized split, and a bool mask of the rows that are not skipped.

    Args:
        examples: the rows of the split with the columns `text` and `ids`.
        limit: largest length of a prompt in tokens.
        empty: whether a row has an empty response, for each row.
        equal: whether both responses of a pair are equal, for each row.
        has_responses: whether the rows must have responses; otherwise the data may be prompts only.
    """
    table = examples.data
    lengths = pc.list_value_length(table.column("ids")).to_numpy()
    no_prompt = (lengths == 0) | pc.equal(table.column("text"), "").to_numpy()
    nowhere = np.zeros(len(examples), dtype=bool)
    no_response = np.asarray(empty) if has_responses or not all(empty) else nowhere
    counts = Counts(
        rows=len(examples),
        too_long=Some.where(lengths > limit),
        no_prompt=Some.where(no_prompt),
        prompt_tokens=Lengths.of(lengths),
        no_response=Some.where(no_response),
        no_difference=Some.where(np.asarray(equal)),
    )
    return counts, ~no_prompt & (lengths <= limit)


def no_differences(counts: Counts, split: str) -> str:
    """Return the error message for pairs that all have equal responses."""
    return (
        f"task.path must contain pairs with different responses (equal ones teach nothing), got "
        f"{counts.rows:,} pairs of the split {split}, all with chosen equal to rejected; correct the columns"
    )


def all_skipped(counts: Counts, split: str, limit: int) -> str:
    """Return the error message for a split of which no prompt is used."""
    if counts.no_prompt.count == counts.rows:
        return (
            f"task.path must contain prompts, got {counts.rows:,} rows with empty prompts in the split "
            f"{split}; fill the column of the prompts"
        )
    lengths = counts.prompt_tokens
    return (
        f"task.max_prompt_tokens must be at least the length of some of the {counts.rows:,} prompts of the "
        f"split {split} (longer prompts are skipped), got {limit}; the shortest prompt has {lengths.least:,} "
        f"tokens, the median is {lengths.median:,}, the longest {lengths.largest:,}; set "
        f"task.max_prompt_tokens={lengths.most_of}"
    )
