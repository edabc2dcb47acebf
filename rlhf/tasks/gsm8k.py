"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): school problems whose answer ends in `#### <number>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.config.task import PREFERENCE_COLUMNS
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from rlhf.tasks.source import Stored


COLUMNS = ("question", "answer")


@dataclass(kw_only=True, slots=True)
class GSM8KSource:
    """Questions in a prompt template. As published there are the splits `train` and `test`.

    Where the data has no split `validation`, it is the last `validation_size` rows of `train`, which then
    ends before them; `test` is left for the end.
    """

    problems: Stored
    pairs: Stored | None
    template: str  # with {question}
    validation_size: int

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query` and `reference_response`, the worked answer."""
        rows = self._rows(split)
        return rows.map(
            lambda columns: {
                "query": [self.template.replace("{question}", text) for text in columns["question"]],
                "reference_response": columns["answer"],
            },
            batched=True,
            remove_columns=rows.column_names,
        )

    def preferences(self, split: str) -> Dataset:
        """The split of `task.preferences_path` as texts `prompt`, `chosen` and `rejected`."""
        if self.pairs is None:
            raise UserError(
                "task.preferences_path must name a folder of preference pairs for task=gsm8k (the data set "
                "has none), got null; set task.preferences_path=<folder>"
            )
        return self.pairs.load(split, PREFERENCE_COLUMNS)

    def _rows(self, split: str) -> Dataset:
        whole = split == "test" or (self.problems.local and "validation" in self.problems.splits())
        if whole:
            return self.problems.load(split, COLUMNS)
        rows = self.problems.load("train", COLUMNS)
        if self.validation_size >= len(rows):
            raise UserError(
                f"task.validation_size must leave some of the {len(rows)} training rows (validation is their "
                f"end), got {self.validation_size}; set task.validation_size={len(rows) // 10}"
            )
        first = len(rows) - self.validation_size
        return rows.select(range(first) if split == "train" else range(first, len(rows)))
