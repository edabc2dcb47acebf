"""Sources of task data, from the hub, a local folder or a seed, as data sets with canonical columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, ClassVar, Protocol

import datasets
import huggingface_hub
import pyarrow
from datasets import Dataset, DatasetDict, Value, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerFast

from rlhf.config.task import PREFERENCE_COLUMNS, PROMPT_COLUMNS
from rlhf.core import hub
from rlhf.core.errors import UserError
from rlhf.tasks.columns import conversation, converted, pair, text
from rlhf.tasks.folders import (
    file_columns,
    find_split,
    folder_problems,
    is_saved,
    read,
    split_columns,
    split_files,
)
from rlhf.tasks.records import NOTHING, RECORD, Wanted
from rlhf.tasks.word_tokenizer import word_tokenizer

if TYPE_CHECKING:
    from rlhf.config.task import EmbeddedTaskConfig, TaskConfig, TLDRConfig
    from rlhf.tasks.reading import Row

CHUNK = 10_000  # rows that are converted to a table at a time
IN_MEMORY = 50_000_000  # bytes of rows that are stored in memory; more rows are stored in a file
MESSAGES = pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()}))


class Source(Protocol):
    """The source of the examples of a task. Splits are `train`, `validation` and `test`.

    Attributes:
        conversational: the prompts are dialogues; a response then ends as a turn of the chat template ends.
    """

    conversational: bool

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`.

        Dialogues have a column `messages` instead of `query`: a list of {role, content}, without the
        response. Data without references have an empty `reference_response`. An optional column
        `demonstration` contains the text that SFT imitates instead of the reference, an optional column
        `place` the place of the row for messages, such as "line 3 of data/train.jsonl". Prompts of pairs have
        the column `rejected`, too. If reward functions ask for columns (`wanted`), the column `record`
        contains them.
        """

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `prompt` (text or messages), `chosen` and `rejected` (texts) of the split.

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
        return list(split_columns(Path(self.place).expanduser(), self.key))

    def load(
        self, split: str, columns: Sequence[str], texts: bool = True, wanted: Wanted = NOTHING
    ) -> Dataset:
        """Return one split with the columns `columns`; from files also with the column `place`.

        Args:
            split: the split to load.
            columns: the names of the columns.
            texts: whether every column must contain texts, otherwise lists of messages.
            wanted: further columns, which become the column `record`.

        Raises:
            UserError: the data, the split or a column is missing, or a row has another content.
        """
        value = text if texts else conversation
        convert = wanted.recording(lambda row: {column: value(row, column) for column in columns})
        return self._converted(split, columns, convert, wanted=wanted)

    def load_pairs(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return one split with the columns `prompt` (text or messages), `chosen` and `rejected` (texts).

        Raises:
            UserError: the data, the split or a column is missing, or a row has another content.
        """
        return self._converted(split, PREFERENCE_COLUMNS, wanted.recording(pair), wanted=wanted)

    def pairs_are_dialogues(self, split: str) -> bool:
        """Return whether the prompts of the pairs are lists of messages. Of files, only one row is read."""
        first = self._converted(split, PREFERENCE_COLUMNS, pair, limit=1)
        return not isinstance(first.features["prompt"], Value)

    def _converted(
        self,
        split: str,
        columns: Sequence[str],
        convert: Callable[[Row], Row],
        limit: int | None = None,
        wanted: Wanted = NOTHING,
    ) -> Dataset:
        """Return the rows of a split after `convert`, which does not change texts; `limit`: fewer rows."""
        folder = Path(self.place).expanduser()
        if self.local:
            reason = "training reads the folder"
            for problem in folder_problems(self.key, self.place, columns, [split], reason, whole=False):
                raise UserError(problem)
        if self.local and not is_saved(folder):
            splits = split_files(folder, self.key)
            files = splits[find_split(splits, split, self.key) or split]
            kept = wanted.read(columns, file_columns(files, self.key), self.place)
            rows = read(files, self.key, kept)
        else:
            dataset = saved_split(folder, split, self.key) if self.local else self._from_hub(split)
            check_columns(dataset, columns, self.key, f"{self.place} in its split {split}")
            kept = wanted.read(columns, dataset.column_names, self.place)
            if not wanted and all(is_text(dataset, column) for column in columns):
                return dataset.select_columns(list(columns))  # a large data set is not copied into memory
            rows = numbered(selected(dataset, kept), f"the split {split} of {self.place}")
        return from_rows(islice(converted(rows, convert, self.key), limit))

    def _from_hub(self, split: str) -> Dataset:
        offline = hub.unreachable()
        try:
            with only_cache() if offline else nullcontext():
                return load_dataset(self.place, self.subset, split=split)
        except ValueError as error:  # the message of datasets names the existing splits or subsets
            raise UserError(
                f"{self.key} must have the split {split}, got {self.place}: {error}; "
                f"set task.path=<folder with {split}.jsonl>"
            ) from error
        except OSError as error:  # not found, or no network
            reason = f"{offline}, and it is not in the cache of this machine" if offline else str(error)
            raise UserError(
                f"{self.key} must name a data set that can be loaded ({reason}), got {self.place}; check "
                "the name and the network, or set task.path=<local folder>"
            ) from error


@contextmanager
def only_cache() -> Iterator[None]:
    """Return a context in which data sets come from the hub's cache, without attempts to reach the hub."""
    with ExitStack() as changes:
        for settings in (datasets.config, huggingface_hub.constants):
            changes.callback(setattr, settings, "HF_HUB_OFFLINE", settings.HF_HUB_OFFLINE)
            setattr(settings, "HF_HUB_OFFLINE", True)  # noqa: B010
        yield


def from_rows(rows: Iterator[tuple[str, Row]]) -> Dataset:
    """Return rows as a data set, with the place of each row in the column `place`.

    Up to `IN_MEMORY` bytes are stored in memory. More are stored in a temporary file, from which the system
    reads the rows that are used; so are the rows that `Dataset.map` makes of them.

    Args:
        rows: place and content of each row; all rows have the same columns, of texts or lists of messages.

    Raises:
        UserError: the temporary file cannot be written.
    """
    first = next(rows)
    schema = pyarrow.schema(
        {name: MESSAGES if isinstance(value, list) else pyarrow.string() for name, value in first[1].items()}
        | {"place": pyarrow.string()}
    )
    made = tables(chain([first], rows), schema)
    small: list[pyarrow.Table] = []
    for table in made:
        small.append(table)
        if sum(each.nbytes for each in small) > IN_MEMORY:
            return in_file(chain(small, made), schema)
    return Dataset(pyarrow.concat_tables(small))


def tables(rows: Iterator[tuple[str, Row]], schema: pyarrow.Schema) -> Iterator[pyarrow.Table]:
    """Yield rows as tables of `CHUNK` rows, with the place of each row in the column `place`."""
    while chunk := [{**row, "place": place} for place, row in islice(rows, CHUNK)]:
        yield pyarrow.Table.from_pylist(chunk, schema)


def in_file(tables: Iterator[pyarrow.Table], schema: pyarrow.Schema) -> Dataset:
    """Return the rows of `tables` as a data set in a temporary file, which is memory-mapped.

    Raises:
        UserError: the file cannot be written.
    """
    folder = scratch()
    file = folder / f"rows-{len(list(folder.iterdir()))}.arrow"
    try:
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            for table in tables:
                writer.write_table(table)
    except OSError as error:
        raise UserError(
            "TMPDIR must be a folder with room for rows that are not stored in memory "
            f"({error.strerror or error}), got {gettempdir()}; run: export TMPDIR=<folder on a disk>"
        ) from error
    return Dataset.from_file(str(file))


def scratch() -> Path:
    """Return the folder of this process for rows that are too large for memory; removed at its end."""
    return Path(scratch_folder().name)


@cache
def scratch_folder() -> TemporaryDirectory[str]:
    """Create the folder of `scratch`."""
    return TemporaryDirectory(prefix="rlhf-data-")


def saved_split(folder: Path, split: str, key: str) -> Dataset:
    """Return a split of a folder that `datasets.save_to_disk` wrote.

    Raises:
        UserError: the files of the folder are damaged.
    """
    try:
        saved = load_from_disk(str(folder))
        return saved[find_split(saved, split, key) or split] if isinstance(saved, DatasetDict) else saved
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key} must contain a complete data set of datasets.save_to_disk, got {folder} "
            f"({type(error).__name__}: {error}); save the data set again"
        ) from error


def check_columns(dataset: Dataset, columns: Collection[str], key: str, place: str) -> None:
    """Raise UserError if a data set lacks one of the columns; `chosen` may contain the prompt of a pair."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing and not (missing == ["prompt"] and "chosen" in columns):
        raise UserError(
            f"{key} must have the columns {', '.join(columns)}, got {place} with "
            f"{', '.join(dataset.column_names)}; rename or add {', '.join(missing)}"
        )


def is_text(dataset: Dataset, column: str) -> bool:
    """Return whether a data set has a column of texts without missing values."""
    if column not in dataset.column_names:
        return False
    kind = getattr(dataset.features[column], "dtype", "")
    return kind in ("string", "large_string") and not dataset.data.column(column).null_count


def selected(dataset: Dataset, columns: Sequence[str] | None) -> Dataset:
    """Return the columns of a data set that it has among `columns`; None: all columns."""
    if columns is None:
        return dataset
    return dataset.select_columns([name for name in dataset.column_names if name in columns])


def numbered(dataset: Dataset, name: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a data set, each with its place, such as "row 3 of the split train of a/b"."""
    return ((f"row {number} of {name}", row) for number, row in enumerate(dataset, 1))


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
    return pairs.load_pairs(split, wanted)


def prompts_of_pairs(pairs: Dataset) -> Dataset:
    """Return the prompts of pairs; the chosen responses are the references. The column `rejected` remains.

    Args:
        pairs: columns `prompt` (text or messages), `chosen` and `rejected`.
    """
    prompt = "query" if is_text(pairs, "prompt") else "messages"
    return pairs.rename_columns({"prompt": prompt, "chosen": "reference_response"})


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
        return self.stored_prompts.load(split, PROMPT_COLUMNS, wanted=wanted)

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
    conversational: ClassVar[bool] = False

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

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `query` and `reference_response` of a split, generated or from `task.path`."""
        if self.config.path is not None:
            return Stored(key="task.path", place=self.config.path).load(split, PROMPT_COLUMNS, wanted=wanted)
        rows = Dataset.from_dict(self.generate(split, getattr(self.config, f"{split}_size")))
        if not wanted:
            return rows
        wanted.read(rows.column_names, rows.column_names, f"task={self.config.name}")
        return rows.add_column(RECORD, [wanted.record(row) for row in rows])

    def preferences(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `prompt`, `chosen` and `rejected` of a split of `task.preferences_path`."""
        reason = "pairs are sampled from its SFT model and labelled by gold"
        return load_pairs(pairs_of(self.config), split, self.config.name, reason, wanted)
