"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): school problems whose answers end in `#### <number>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.core.errors import UserError
from rlhf.tasks.source import load_pairs, pairs_of, prompts_of

if TYPE_CHECKING:
    from rlhf.config.task import GSM8KConfig

COLUMNS = ("question", "answer")


class GSM8KSource:
    """Questions in a prompt template. The published data set has the splits `train` and `test`.

    If the data set has no split `validation`, the last `task.validation_size` rows of `train` are the
    validation split, and `train` ends before them. `test` is not used for either.

    Args:
        config: the section of the task.
    """

    def __init__(self, config: GSM8KConfig) -> None:
        self.config = config
        self.problems = prompts_of(config, config.prompts_name, subset="main")

    def prompts(self, split: str) -> Dataset:
        """Return the split as texts `query` and `reference_response`, the worked answer."""
        rows = self._rows(split)
        return rows.map(
            lambda columns: {
                "query": [self.config.template.replace("{question}", text) for text in columns["question"]],
                "reference_response": columns["answer"],
            },
            batched=True,
            remove_columns=rows.column_names,
        )

    def preferences(self, split: str) -> Dataset:
        """Return the split of `task.preferences_path` as texts `prompt`, `chosen` and `rejected`."""
        return load_pairs(pairs_of(self.config), split, "gsm8k", "the data set has none")

    def _rows(self, split: str) -> Dataset:
        whole = split == "test" or (self.problems.local and "validation" in self.problems.splits())
        if whole:
            return self.problems.load(split, COLUMNS)
        rows = self.problems.load("train", COLUMNS)
        if self.config.validation_size >= len(rows):
            raise UserError(
                f"task.validation_size must leave some of the {len(rows)} training rows (the last rows are "
                f"the validation split), got {self.config.validation_size}; "
                f"set task.validation_size={len(rows) // 10}"
            )
        first = len(rows) - self.config.validation_size
        return rows.select(range(first) if split == "train" else range(first, len(rows)))
