"""Sources of task data, from the hub, a local folder or a seed, as data sets with canonical columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import datasets
import huggingface_hub
import pyarrow
from datasets import Dataset, DatasetDict, Features, Json, Value, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerFast

from rlhf.config.task import PREFERENCE_COLUMNS, PROMPT_COLUMNS
from rlhf.core import hub
from rlhf.core.errors import UserError
from rlhf.tasks.columns import conversion, converted
from rlhf.tasks.folders import Splits, data_folder, lacking
from rlhf.tasks.formats import TOOLS
from rlhf.tasks.records import NOTHING, RECORD, Wanted
from rlhf.tasks.storage import from_rows, has_lists, is_text, mapped, numbered
from rlhf.tasks.word_tokenizer import word_tokenizer

if TYPE_CHECKING:
    from rlhf.config.task import EmbeddedTaskConfig, TaskConfig, TLDRConfig
    from rlhf.tasks.reading import Row


class Source(Protocol):
    """The source of the examples of a task. Splits are `train`, `validation` and `test`.

    Attributes:
        conversational: the prompts are dialogues; a response then ends as a turn of the chat template ends.
    """

    conversational: bool

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`.

        Dialogues have a column `messages` instead of `query`: a list of messages (`role`, `content` and
        further keys), without the response, which is a list of one message. They may have a column `tools`.
        Data without references have an empty `reference_response`. An optional column `demonstration`
        contains the text that SFT imitates instead of the reference (of dialogues: all messages from the
        first reply on), an optional column `place` the place of the row for messages, such as "line 3 of
        data/train.jsonl". Prompts of pairs have the column
        `rejected`, too. If reward functions ask for columns (`wanted`), the column `record` contains them.
        """

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `prompt`, `chosen` and `rejected` of the split: texts, or lists of messages.

        There is a column `record` as in `prompts`.
        """


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
        return Splits(self.place, self.key).names

    def load(
        self,
        split: str,
        columns: Sequence[str],
        wanted: Wanted = NOTHING,
        convert: Callable[[Row], Row] | None = None,
        limit: int | None = None,
    ) -> Dataset:
        """Return one split after `convert`; from files also with the column `place`.

        Args:
            split: the split to load.
            columns: the required columns.
            wanted: further columns, which become the column `record`.
            convert: returns the new columns of a row; does not change rows of texts only. None: the function
                for these columns, which also checks data before a run.
            limit: largest number of rows; None: all rows.

        Raises:
            UserError: the data, the split or a column is missing, or `convert` refuses a row.
        """
        if self.local:
            reason = "training reads the folder"
            data = data_folder(self.key, self.place, reason)
            for problem in data.problems_with(columns, [split], reason, whole=False):
                raise UserError(problem)
            name = data.stored(split) or split
        if self.local and not data.saved:
            kept = wanted.read([*columns, TOOLS], data.columns(name), self.place)
            rows = data.rows(name, kept)
        else:
            dataset = saved_split(data, name) if self.local else self._from_hub(split)
            _check_columns(dataset, columns, self.key, f"{self.place} in its split {split}")
            kept = wanted.read([*columns, TOOLS], dataset.column_names, self.place)
            plain = all(is_text(dataset, each) and not has_lists(dataset, each) for each in columns)
            if plain and not wanted.asks:
                return dataset.select_columns(list(columns))  # a large data set is not copied into memory
            rows = numbered(dataset, f"the split {split} of {self.place}", kept)
        convert = wanted.recording(convert or conversion(columns))
        return from_rows(islice(converted(rows, convert, self.key), limit))

    def pairs_are_dialogues(self, split: str) -> bool:
        """Return whether the prompts of the pairs are lists of messages. Of files, only one row is read."""
        first = self.load(split, PREFERENCE_COLUMNS, limit=1)
        return not isinstance(first.features["prompt"], Value)

    def _from_hub(self, split: str) -> Dataset:
        offline = hub.unreachable()
        try:
            with _only_cache() if offline else nullcontext():
                return load_dataset(self.place, self.subset, split=split)
        except ValueError as error:  # the message of datasets names the existing splits or subsets
            raise UserError(
                f"{self.key} must have the split {split}, got {self.place}: {error}; "
                f"set task.path=<folder with {split}.jsonl>"
            ) from None
        except OSError as error:  # not found, or no network
            reason = f"{offline}, and it is not in the cache of this machine" if offline else str(error)
            raise UserError(
                f"{self.key} must name a data set that can be loaded ({reason}), got {self.place}; check "
                "the name and the network, or set task.path=<local folder>"
            ) from None


@contextmanager
def _only_cache() -> Iterator[None]:
    """Return a context in which data sets come from the hub's cache, without attempts to reach the hub."""
    with ExitStack() as changes:
        for settings in (datasets.config, huggingface_hub.constants):
            changes.callback(setattr, settings, "HF_HUB_OFFLINE", settings.HF_HUB_OFFLINE)
            setattr(settings, "HF_HUB_OFFLINE", True)  # noqa: B010
        yield


def saved_split(data: Splits, name: str) -> Dataset:
    """Return the split that is stored as `name` in a folder that `datasets.save_to_disk` wrote.

    Raises:
        UserError: the files of the folder are damaged.
    """
    try:
        saved = load_from_disk(str(data.path))
        return saved[name] if isinstance(saved, DatasetDict) else saved
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise data.damaged(error) from None


def _check_columns(dataset: Dataset, columns: Collection[str], key: str, place: str) -> None:
    if missing := lacking(columns, dataset.column_names):
        raise UserError(
            f"{key} must have the columns {', '.join(columns)}, got {place} with "
            f"{', '.join(dataset.column_names)}; rename or add {', '.join(missing)}"
        )


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


def load_pairs(pairs: Stored | None, split: str, task: str, reason: str, wanted: Wanted = NOTHING) -> Dataset:
    """Return a split of `pairs` with the columns `prompt` (text or messages), and `chosen` and `rejected`.

    Args:
        pairs: result of `pairs_of`.
        split: the split to load.
        task: the name of the task, for error messages.
        reason: why the task has no pairs of its own, for error messages.
        wanted: further columns, which become the column `record`.

    Raises:
        UserError: the config names no pairs, or the pairs cannot be loaded.
    """
    if pairs is None:
        raise UserError(
            f"task.preferences_path must name a folder of preference pairs for task={task} ({reason}), got "
            "null; set task.preferences_path=<folder>"
        )
    return pairs.load(split, PREFERENCE_COLUMNS, wanted)


def prompts_of_pairs(pairs: Dataset) -> Dataset:
    """Return the prompts of pairs; the chosen responses are the references. The column `rejected` remains.

    Args:
        pairs: columns `prompt` (text or messages), `chosen` and `rejected`.
    """
    prompt = "query" if is_text(pairs, "prompt") else "messages"
    return pairs.rename_columns({"prompt": prompt, "chosen": "reference_response"})


def as_messages(rows: Dataset) -> Dataset:
    """Return rows whose prompts and responses are messages of the user and the assistant, not texts."""
    rows = rows.rename_column("query", "messages") if "query" in rows.column_names else rows
    named = ("messages", "prompt", "reference_response", "chosen", "rejected")
    roles = {name: "user" if name in named[:2] else "assistant" for name in named if name in rows.features}

    def converted(columns: dict[str, list[str]]) -> dict[str, list]:
        return {
            name: [
                [{"role": role, "content": text}] if text or name != named[2] else []
                for text in columns[name]
            ]
            for name, role in roles.items()
        }

    features = Features({**rows.features, **{name: Json() for name in roles}})
    return mapped(rows, converted, features=features, batched=True)


class DialogueSource:
    """The prompts of another source, whose texts become messages of the user."""

    conversational = True

    def __init__(self, texts: Source) -> None:
        self.texts = texts

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`."""
        return as_messages(self.texts.prompts(split, wanted))

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Raise an error: pairs of texts are not converted."""
        raise NotImplementedError("validated: no pairs are read with an environment")


class StoredSource:
    """A source of stored prompts and preference pairs that already have the canonical columns.

    Args:
        config: config section of the task.
    """

    conversational = False

    def __init__(self, config: TLDRConfig) -> None:
        self.stored_prompts = prompts_of(config, config.prompts_name)
        self.pairs = pairs_of(config, config.preferences_name, beside_prompts=True)

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`."""
        return self.stored_prompts.load(split, PROMPT_COLUMNS, wanted)

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `prompt`, `chosen` and `rejected`."""
        return load_pairs(self.pairs, split, "tldr", "it names none", wanted)


class EmbeddedSource(ABC):
    """A source whose prompts and references are generated from a seed.

    Preference pairs are not generated: a prerequisite stage samples responses of the SFT model and labels
    them with the gold score.

    Args:
        config: config section of the task.
    """

    pattern: ClassVar[str]  # regular expression that matches one token of a text
    conversational: bool = False

    def __init__(self, config: EmbeddedTaskConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token of the generated texts, without special tokens."""

    @abstractmethod
    def generate(self, split: str, size: int) -> dict[str, list[Any]]:
        """Return `size` examples as columns; see `Source.prompts`."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary; decoding an encoded text returns exactly the text."""
        return word_tokenizer(self.vocabulary(), self.pattern)

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `query` and `reference_response` of a split, generated or from `task.path`."""
        if self.config.path is not None:
            return Stored(key="task.path", place=self.config.path).load(split, PROMPT_COLUMNS, wanted)
        rows = Dataset.from_dict(self.generate(split, getattr(self.config, f"{split}_size")))
        if not wanted:
            return rows
        wanted.read(rows.column_names, rows.column_names, f"task={self.config.name}")
        return rows.add_column(RECORD, [wanted.record(row) for row in rows])

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `prompt`, `chosen` and `rejected` of a split of `task.preferences_path`."""
        reason = "pairs are sampled from its SFT model and labelled by gold"
        return load_pairs(pairs_of(self.config), split, self.config.name, reason, wanted)
