"""Sources of task data and the storage of their rows; the tokenizer of the embedded tasks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import uuid4

import datasets
import huggingface_hub
import pyarrow
import pyarrow.compute
from datasets import Dataset, DatasetDict, Features, Json, Value, load_dataset, load_from_disk
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.tasks import PREFERENCE_COLUMNS, PROMPT_COLUMNS
from rlhf.core import machine
from rlhf.core.errors import UserError
from rlhf.tasks.columns import conversion, converted
from rlhf.tasks.files import Splits, data_folder, lacking
from rlhf.tasks.reading import NOTHING, RECORD, TOOLS, Wanted, rows_of_arrow

if TYPE_CHECKING:
    from rlhf.config.tasks import EmbeddedTaskConfig, TaskConfig, TLDRConfig
    from rlhf.tasks.reading import Row


# Sources of task data, from the hub, a local folder or a seed, as data sets with canonical columns.


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
    """A data set under a hub name or in a local folder (see `rlhf.tasks.files`)."""

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
        offline = machine.unreachable()
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


# Storage of the rows of a task: in memory or in a temporary folder, never beside the data of the user.


CHUNK = 10_000  # rows that are converted to a table at a time
IN_MEMORY = 50_000_000  # bytes of rows that are stored in memory; more rows are stored in a file


def from_rows(rows: Iterator[tuple[str, Row]]) -> Dataset:
    """Return rows as a data set, with the place of each row in the column `place`.

    Up to `IN_MEMORY` bytes are stored in memory. More are stored in a temporary file, from which the system
    reads the rows that are used; so are the rows that `mapped` makes of them.

    Args:
        rows: place and content of each row; all rows have the same columns. Values other than texts are
            stored as JSON, which keeps their keys and their order.

    Raises:
        UserError: the temporary file cannot be written.
    """
    first = next(rows)
    kinds = {
        name: pyarrow.string() if isinstance(value, str) else Json().pa_type
        for name, value in first[1].items()
    }
    schema = pyarrow.schema(kinds | {"place": pyarrow.string()})
    made = tables(chain([first], rows), schema)
    small: list[pyarrow.Table] = []
    for table in made:
        small.append(table)
        if sum(each.nbytes for each in small) > IN_MEMORY:
            return _in_file(chain(small, made), schema)
    return Dataset(pyarrow.concat_tables(small))


def tables(rows: Iterator[tuple[str, Row]], schema: pyarrow.Schema) -> Iterator[pyarrow.Table]:
    """Yield rows as tables of `CHUNK` rows, with the place of each row in the column `place`."""
    while chunk := [{**row, "place": place} for place, row in islice(rows, CHUNK)]:
        columns = []
        for field in schema:
            values = [row[field.name] for row in chunk]
            if field.type == Json().pa_type:
                stored = pyarrow.array([json.dumps(value) for value in values], field.type.storage_type)
                columns.append(pyarrow.ExtensionArray.from_storage(field.type, stored))
            else:
                columns.append(pyarrow.array(values, field.type))
        yield pyarrow.Table.from_arrays(columns, schema=schema)


def numbered(
    dataset: Dataset, name: str, columns: Collection[str] | None = None
) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a data set, each with its place, such as "row 3 of the split train of a/b".

    Args:
        dataset: the data set.
        name: its name in the places.
        columns: the columns to read, if the data set has them; None: all columns.
    """
    kept = [each for each in dataset.column_names if columns is None or each in columns]
    batches = dataset.select_columns(kept).with_format("arrow").iter(1000)
    for number, row in enumerate(chain.from_iterable(map(rows_of_arrow, batches)), 1):
        yield f"row {number} of {name}", row


def mapped(rows: Dataset, function: Callable[..., Row], **options: Any) -> Dataset:
    """Return `rows.map(function, **options)`, without a cache file beside the data.

    The result of rows on a disk is stored in the temporary folder of this process, other results in memory.
    """
    return rows.map(function, **options, **temporary(rows), new_fingerprint=uuid4().hex)


def temporary(rows: Dataset) -> dict[str, Any]:
    """Return the arguments of `Dataset.map` and `Dataset.cast` for a result in the temporary folder."""
    if not rows.cache_files:
        return {}
    return {"cache_file_name": str(scratch() / f"{uuid4().hex}.arrow"), "load_from_cache_file": False}


def _in_file(tables: Iterator[pyarrow.Table], schema: pyarrow.Schema) -> Dataset:
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
        ) from None
    return Dataset.from_file(str(file))


def scratch() -> Path:
    """Return the folder of this process for rows that are too large for memory; removed at its end."""
    return Path(_scratch_folder().name)


@cache
def _scratch_folder() -> TemporaryDirectory[str]:
    """Create the folder of `scratch`."""
    return TemporaryDirectory(prefix="rlhf-data-")


def is_text(dataset: Dataset, column: str) -> bool:
    """Return whether a data set has a column of texts without missing values."""
    if column not in dataset.column_names:
        return False
    kind = getattr(dataset.features[column], "dtype", "")
    return kind in ("string", "large_string") and not dataset.data.column(column).null_count


def has_lists(dataset: Dataset, column: str) -> bool:
    """Return whether some texts of a column may be lists of objects in JSON, such as dialogues."""
    found = pyarrow.compute.match_substring_regex(dataset.data.column(column), r"^\s*\[[^{]*\{")
    return bool(pyarrow.compute.any(found).as_py())


# The tokenizer of the embedded tasks: one token per word of the generated texts.


SPECIAL = EOS, PAD, UNK = "<|endoftext|>", "<|padding|>", "<|unknown|>"


def word_tokenizer(vocabulary: Sequence[str], pattern: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word.

    Args:
        vocabulary: the words, in the order of their token ids after EOS, PAD and UNK. A word should include
            the space before it, so that decoding returns exactly the encoded text.
        pattern: regular expression that matches one word of a text.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *vocabulary]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
