"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): school problems whose answers end in `#### <number>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasets import Dataset

from rlhf.core.errors import UserError
from rlhf.tasks.records import NOTHING, Wanted
from rlhf.tasks.source import as_messages, load_pairs, pairs_of, prompts_of
from rlhf.tasks.storage import mapped

if TYPE_CHECKING:
    from rlhf.config.task import GSM8KConfig

COLUMNS = ("question", "answer")


class GSM8KSource:
    """A source of GSM8K questions in a prompt template; with `task.chat`, as messages of the user.

    The published data set has the splits `train` and `test`. The last `task.validation_size` rows of `train`
    are the validation split, and the training split ends before these rows. A local folder with a split
    `validation` is used as stored.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: GSM8KConfig) -> None:
        self.config = config
        self.conversational = config.chat
        self.problems = prompts_of(config, config.prompts_name, subset="main")

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with `query` (or `messages`) and `reference_response`, the worked answer.

        Raises:
            UserError: the split cannot be loaded, or `task.validation_size` leaves no training rows.
        """
        rows = self._rows(split, wanted)
        texts = mapped(rows, self._formatted, batched=True, remove_columns=list(COLUMNS))
        return as_messages(texts) if self.config.chat else texts

    def _formatted(self, columns: dict[str, list[str]]) -> dict[str, list[str]]:
        prompts = [self.config.question_format.replace("{question}", text) for text in columns["question"]]
        return {"query": prompts, "reference_response": columns["answer"]}

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return a split of `task.preferences_path` with the text columns `prompt`, `chosen` and `rejected`.

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        return load_pairs(pairs_of(self.config), split, "gsm8k", "the data set has none", wanted)

    def _rows(self, split: str, wanted: Wanted) -> Dataset:
        whole = split == "test" or (self.problems.local and "validation" in self.problems.splits())
        if whole:
            return self.problems.load(split, COLUMNS, wanted)
        rows = self.problems.load("train", COLUMNS, wanted)
        if self.config.validation_size >= len(rows):
            raise UserError(
                f"task.validation_size must leave some of the {len(rows)} training rows (the last rows are "
                f"the validation split), got {self.config.validation_size}; "
                f"set task.validation_size={len(rows) // 10}"
            )
        first = len(rows) - self.config.validation_size
        return rows.select(range(first) if split == "train" else range(first, len(rows)))
