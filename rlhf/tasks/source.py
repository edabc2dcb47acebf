"""Sources of task data, from the hub, a local folder or a seed, as data sets with canonical columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerFast

from rlhf.config.task import PREFERENCE_COLUMNS, PROMPT_COLUMNS
from rlhf.core.errors import UserError
from rlhf.tasks.folders import FORMATS, folder_problems, is_saved, split_columns, split_files
from rlhf.tasks.word_tokenizer import word_tokenizer

if TYPE_CHECKING:
    from rlhf.config.task import EmbeddedTaskConfig, TaskConfig, TLDRConfig


class Source(Protocol):
    """The source of the examples of a task. Splits are `train`, `validation` and `test`."""

    def prompts(self, split: str) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`.

        An optional column `demonstration` contains the text that SFT imitates instead of the reference.
        """

    def preferences(self, split: str) -> Dataset:
        """Return the split with the text columns `prompt`, `chosen` and `rejected`."""


@dataclass(kw_only=True, slots=True)
class Stored:
    """A data set under a hub name or in a local folder (see `rlhf.tasks.folders`)."""

    key: str  # config key that names the data set, for error messages
    place: str  # hub name or folder
    subset: str | None = None  # subset of a hub data set

    @property
    def local(self) -> bool:
        """Return True if `place` is a folder or `key` is `task.path` or `task.preferences_path`."""
        return self.key.endswith("path") or Path(self.place).expanduser().is_dir()

    def splits(self) -> list[str]:
        """Return the splits of a local folder."""
        return list(split_columns(Path(self.place).expanduser()))

    def load(self, split: str, columns: Sequence[str], texts: bool = True) -> Dataset:
        """Return one split with the columns `columns`.

        Args:
            split: the split to load.
            columns: the names of the columns.
            texts: whether every column must contain texts.

        Raises:
            UserError: the folder, the split or a column is missing, or a column does not contain texts.
        """
        dataset = self._from_folder(split, columns) if self.local else self._from_hub(split)
        missing = [column for column in columns if column not in dataset.column_names]
        if missing:
            raise UserError(
                f"{self.key} must have the columns {', '.join(columns)} in its split {split}, got "
                f"{self.place} with {', '.join(dataset.column_names)}; rename or add {', '.join(missing)}"
            )
        for column in columns if texts else ():
            kind = getattr(dataset.features[column], "dtype", "a nested type")
            if kind not in ("string", "large_string"):
                raise UserError(
                    f"{self.key} must have texts in its column {column}, got {self.place} with {kind} in "
                    f"the split {split}; convert the column to strings"
                )
        return dataset.select_columns(list(columns))

    def _from_folder(self, split: str, columns: Sequence[str]) -> Dataset:
        for problem in folder_problems(self.key, self.place, columns, [split], "training reads the folder"):
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
        except ValueError as error:  # the message of datasets names the existing splits or subsets
            raise UserError(
                f"{self.key} must have the split {split}, got {self.place}: {error}; "
                f"set task.path=<folder with {split}.jsonl>"
            ) from error
        except OSError as error:  # not found, or no network
            raise UserError(
                f"{self.key} must name a data set that can be loaded, got {self.place}: {error}; check "
                "the name and the network, or set task.path=<local folder>"
            ) from error


def prompts_of(config: TaskConfig, hub_name: str, subset: str | None = None) -> Stored:
    """Return the prompts of a task: `task.path` if it is set, else the hub data set.

    Args:
        config: config section of the task.
        hub_name: the value of `task.prompts_name`.
        subset: subset of the hub data set.
    """
    if config.path is not None:
        return Stored(key="task.path", place=config.path)
    return Stored(key="task.prompts_name", place=hub_name, subset=subset)


def pairs_of(config: TaskConfig, hub_name: str | None = None, beside_prompts: bool = False) -> Stored | None:
    """Return the preference pairs of a task; None if the config names no pairs.

    Args:
        config: config section of the task.
        hub_name: the value of `task.preferences_name`, if the task has that key.
        beside_prompts: whether the folder `task.path` also contains pairs.
    """
    if config.preferences_path is not None:
        return Stored(key="task.preferences_path", place=config.preferences_path)
    if beside_prompts and config.path is not None:
        return Stored(key="task.path", place=config.path)
    return None if hub_name is None else Stored(key="task.preferences_name", place=hub_name)


def load_pairs(pairs: Stored | None, split: str, task: str, reason: str) -> Dataset:
    """Return a split of `pairs` with the text columns `prompt`, `chosen` and `rejected`.

    Args:
        pairs: result of `pairs_of`.
        split: the split to load.
        task: the name of the task, for error messages.
        reason: why the task has no pairs of its own, for error messages.

    Raises:
        UserError: the config names no pairs, or the pairs cannot be loaded.
    """
    if pairs is None:
        raise UserError(
            f"task.preferences_path must name a folder of preference pairs for task={task} ({reason}), got "
            "null; set task.preferences_path=<folder>"
        )
    return pairs.load(split, PREFERENCE_COLUMNS)


class StoredSource:
    """A source of stored prompts and preference pairs that already have the canonical columns.

    Args:
        config: config section of the task.
    """

    def __init__(self, config: TLDRConfig) -> None:
        self.stored_prompts = prompts_of(config, config.prompts_name)
        self.pairs = pairs_of(config, config.preferences_name, beside_prompts=True)

    def prompts(self, split: str) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`."""
        return self.stored_prompts.load(split, PROMPT_COLUMNS)

    def preferences(self, split: str) -> Dataset:
        """Return the split with the text columns `prompt`, `chosen` and `rejected`."""
        return load_pairs(self.pairs, split, "tldr", "it names none")


class EmbeddedSource(ABC):
    """A source whose prompts and references are generated from a seed.

    Preference pairs are not generated: a prerequisite stage samples responses of the SFT model and labels
    them with the gold score.

    Args:
        config: config section of the task.
    """

    pattern: ClassVar[str]  # regular expression that matches one token of a text

    def __init__(self, config: EmbeddedTaskConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token of the generated texts, without special tokens."""

    @abstractmethod
    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` examples as columns `query`, `reference_response` and optionally `demonstration`."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary; decoding an encoded text returns exactly the text."""
        return word_tokenizer(self.vocabulary(), self.pattern)

    def prompts(self, split: str) -> Dataset:
        """Return the columns `query` and `reference_response` of a split, generated or from `task.path`."""
        if self.config.path is not None:
            return Stored(key="task.path", place=self.config.path).load(split, PROMPT_COLUMNS)
        return Dataset.from_dict(self.generate(split, getattr(self.config, f"{split}_size")))

    def preferences(self, split: str) -> Dataset:
        """Return the columns `prompt`, `chosen` and `rejected` of a split of `task.preferences_path`."""
        reason = "pairs are sampled from its SFT model and labelled by gold"
        return load_pairs(pairs_of(self.config), split, self.config.name, reason)
