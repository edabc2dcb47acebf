"""Loading what a task is made of, from the hub or a local folder, as data sets with canonical columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from rlhf.config.task import PREFERENCE_COLUMNS, PROMPT_COLUMNS
from rlhf.core.errors import UserError
from rlhf.tasks.folders import FORMATS, folder_problems, is_saved, split_columns, split_files

if TYPE_CHECKING:
    from rlhf.config.task import EmbeddedTaskConfig


class Source(Protocol):
    """Where a task's examples come from. Splits are `train`, `validation` and `test`."""

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query` and `reference_response`, and `demonstration` where SFT is to imitate
        another text than the reference.
        """

    def preferences(self, split: str) -> Dataset:
        """The split as texts `prompt`, `chosen` and `rejected`."""


@dataclass(kw_only=True, slots=True)
class Stored:
    """A data set under a hub name or in a local folder (see `rlhf.tasks.folders`)."""

    key: str  # the config key that names it, for messages
    place: str  # hub name or folder
    subset: str | None = None  # of a hub data set

    @property
    def local(self) -> bool:
        """Whether it is read from a folder; `task.path` and `task.preferences_path` always are."""
        return self.key.endswith("path") or Path(self.place).expanduser().is_dir()

    def splits(self) -> list[str]:
        """The splits that a local folder holds."""
        return list(split_columns(Path(self.place).expanduser()))

    def load(self, split: str, columns: Sequence[str], texts: bool = True) -> Dataset:
        """The columns `columns` of one split, all of text unless `texts` is False.

        Raises UserError where the folder, the split or a column is missing, or a column does not hold texts.
        """
        dataset = self._from_folder(split, columns) if self.local else self._from_hub(split)
        missing = [column for column in columns if column not in dataset.column_names]
        if missing:
            raise UserError(
                f"{self.key} must have the columns {', '.join(columns)} in its split {split}, got "
                f"{self.place} "
                f"with {', '.join(dataset.column_names)}; rename or add {', '.join(missing)}"
            )
        for column in columns if texts else ():
            kind = getattr(dataset.features[column], "dtype", "a nested type")
            if kind not in ("string", "large_string"):
                raise UserError(
                    f"{self.key} must have texts in its column {column}, got {self.place} with {kind} "
                    "there in "
                    f"the split {split}; convert the column to strings"
                )
        return dataset.select_columns(list(columns))

    def _from_folder(self, split: str, columns: Sequence[str]) -> Dataset:
        for problem in folder_problems(self.key, self.place, columns, [split], "training reads it"):
            raise UserError(problem)
        folder = Path(self.place).expanduser()
        if is_saved(folder):
            saved = load_from_disk(str(folder))
            return saved[split] if isinstance(saved, DatasetDict) else saved
        file = split_files(folder)[split]
        return load_dataset(FORMATS[file.suffix], data_files=str(file), split="train")

    def _from_hub(self, split: str) -> Dataset:
        try:
            return load_dataset(self.place, self.subset, split=split)
        except ValueError as error:  # datasets names the splits or subsets that exist
            raise UserError(
                f"{self.key} must have the split {split}, got {self.place}: {error}; "
                f"set task.path=<folder with {split}.jsonl>"
            ) from error
        except OSError as error:  # not found, or no network
            raise UserError(
                f"{self.key} must name a data set that can be loaded, got {self.place}: {error}; check "
                "the name "
                "and the network, or set task.path=<local folder>"
            ) from error


@dataclass(kw_only=True, slots=True)
class StoredSource:
    """Prompts and preferences as they are stored, with canonical columns."""

    stored_prompts: Stored
    stored_preferences: Stored

    def prompts(self, split: str) -> Dataset:
        """The split as texts `query` and `reference_response`."""
        return self.stored_prompts.load(split, PROMPT_COLUMNS)

    def preferences(self, split: str) -> Dataset:
        """The split as texts `prompt`, `chosen` and `rejected`."""
        return self.stored_preferences.load(split, PREFERENCE_COLUMNS)


def sampled_pairs(config: EmbeddedTaskConfig, split: str) -> Dataset:
    """The split of an embedded task's `preferences_path` as texts `prompt`, `chosen` and `rejected`."""
    if config.preferences_path is None:
        raise UserError(
            f"task.preferences_path must name a folder of preference pairs for task={config.name} (pairs are "
            "sampled from its sft model and labelled by gold), got null; set task.preferences_path=<folder>"
        )
    stored = Stored(key="task.preferences_path", place=config.preferences_path)
    return stored.load(split, PREFERENCE_COLUMNS)
