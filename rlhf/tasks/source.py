"""Sources of task data and the storage of their rows; the tokenizer of the embedded tasks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, ClassVar
from uuid import uuid4

import datasets
import huggingface_hub
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, Features, Json, concatenate_datasets, load_dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.algorithms import Data
from rlhf.config.tasks import PREFERENCE_COLUMNS, PROMPT_COLUMNS, TaskConfig
from rlhf.core import machine
from rlhf.core.errors import UserError
from rlhf.tasks.columns import NOTHING, RECORD, TOOLS, Convert, Row, Rows, Wanted, conversion, converted
from rlhf.tasks.files import data_folder, lacking, rows_of_arrow


class Source(ABC):
    """The source of the examples of a task. Splits are `train`, `validation` and `test`.

    Args:
        config: config section of the task.
    """

    no_pairs: ClassVar[str] = "it names none"  # why the task has no pairs of its own, for messages
    splits_off_validation: ClassVar[bool] = False  # whether training rows are split off for validation
    pairs_beside_prompts: ClassVar[bool] = False  # whether `task.path` may be the folder of the pairs

    def __init__(self, config: TaskConfig) -> None:
        self.config: Any = config  # each task reads the keys of its own section

    @property
    def conversational(self) -> bool:
        """Whether the prompts are dialogues; a response then ends as a turn of the chat template ends."""
        return bool(self.config.dialogues)

    @abstractmethod
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

        Raises:
            UserError: the config names no pairs, or the pairs cannot be loaded.
        """
        if (pairs := self.stored_pairs()) is None:
            raise UserError(
                f"task.preferences_path must name a folder of preference pairs for task={self.config.name} "
                f"({self.no_pairs}), got null; set task.preferences_path=<folder>"
            )
        return pairs.load(split, PREFERENCE_COLUMNS, wanted)

    def columns(self, data: Data) -> str | None:
        """Return the recognised columns of the training rows as text; None: the task has fixed columns."""
        return None

    def stored_prompts(self, subset: str | None = None) -> _Stored:
        """Return the prompts of the task: `task.path` if it is set, else a subset of the hub data set."""
        if self.config.path is not None:
            return _Stored(key="task.path", place=self.config.path)
        return _Stored(key="task.prompts_name", place=self.config.prompts_name, subset=subset)

    def stored_pairs(self) -> _Stored | None:
        """Return the preference pairs of the task; None if the config names no pairs."""
        if self.config.preferences_path is not None:
            return _Stored(key="task.preferences_path", place=self.config.preferences_path)
        if self.pairs_beside_prompts and self.config.path is not None:
            return _Stored(key="task.path", place=self.config.path)
        name = getattr(self.config, "preferences_name", None)
        return None if name is None else _Stored(key="task.preferences_name", place=name)


@dataclass(kw_only=True, slots=True)
class _Stored:
    """A data set under a hub name or in a local folder (see `rlhf.tasks.files`)."""

    key: str  # config key that names the data set, for error messages
    place: str  # hub name or folder
    subset: str | None = None  # subset of a hub data set

    @property
    def local(self) -> bool:
        """Return True if `place` is a folder or `key` is `task.path` or `task.preferences_path`."""
        return self.key.endswith("path") or Path(self.place).expanduser().is_dir()

    def load(
        self,
        split: str,
        columns: Sequence[str],
        wanted: Wanted = NOTHING,
        convert: Convert | None = None,
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
        dataset: Dataset | None = None
        if self.local:
            reason = "training reads the folder"
            data = data_folder(self.key, self.place, reason)
            for problem in data.problems_with(columns, [split], reason, whole=False):
                raise UserError(problem)
            name = data.stored(split) or split
            available = data.columns(name)
            if data.saved:  # its rows stay on the disk
                try:
                    parts = [Dataset.from_file(str(file)) for file in data.files[name]]
                    dataset = concatenate_datasets(parts)
                except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
                    raise data.damaged(error) from None
        else:
            dataset = self._from_hub(split)
            available = dataset.column_names
            if missing := lacking(columns, available):
                raise UserError(
                    f"{self.key} must have the columns {', '.join(columns)}, got {self.place} in its split "
                    f"{split} with {', '.join(available)}; rename or add {', '.join(missing)}"
                )
        kept = wanted.read([*columns, TOOLS], available, self.place)
        if dataset is not None and not wanted.asks and all(is_text(dataset, each) for each in columns):
            plain, pattern = dataset.select_columns(list(columns)), r"^\s*\[[^{]*\{"  # messages as JSON
            found = (pc.match_substring_regex(plain.data.column(each), pattern) for each in columns)
            if not any(pc.any(each).as_py() for each in found):
                return plain  # a large data set is not copied into memory
        if self.local:
            rows = data.rows(name, kept)
        else:
            rows = numbered(dataset, f"the split {split} of {self.place}", kept)
        convert = wanted.recording(convert or conversion(tuple(columns)))
        return from_rows(islice(converted(rows, convert, self.key), limit))

    def _from_hub(self, split: str) -> Dataset:
        offline = machine.unreachable()
        try:
            with ExitStack() as changes:
                for settings in (datasets.config, huggingface_hub.constants) if offline else ():
                    changes.callback(setattr, settings, "HF_HUB_OFFLINE", settings.HF_HUB_OFFLINE)
                    setattr(settings, "HF_HUB_OFFLINE", True)  # noqa: B010  # no attempts to reach the hub
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


def as_messages(rows: Dataset) -> Dataset:
    """Return rows whose prompts and responses are messages of the user and the assistant, not texts."""
    rows = rows.rename_column("query", "messages") if "query" in rows.column_names else rows
    roles = dict.fromkeys(("messages", "prompt"), "user")
    roles |= dict.fromkeys(("reference_response", "chosen", "rejected"), "assistant")
    roles = {name: role for name, role in roles.items() if name in rows.features}

    def message(name: str, text: str) -> list[dict[str, str]]:
        absent = name == "reference_response" and not text
        return [] if absent else [{"role": roles[name], "content": text}]

    def written(columns: dict[str, list[str]]) -> dict[str, list]:
        return {name: [message(name, text) for text in columns[name]] for name in roles}

    features = Features({**rows.features, **{name: Json() for name in roles}})
    return mapped(rows, written, features=features, batched=True)


class DialogueSource(Source):
    """The prompts of another source, whose texts become messages of the user."""

    def __init__(self, texts: Source) -> None:
        super().__init__(texts.config)
        self.texts = texts

    @property
    def conversational(self) -> bool:
        """Whether the prompts are dialogues: always."""
        return True

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the columns `messages` and `reference_response`."""
        return as_messages(self.texts.prompts(split, wanted))


class StoredSource(Source):
    """A source of stored prompts and preference pairs that already have the canonical columns."""

    pairs_beside_prompts = True

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the split with the text columns `query` and `reference_response`."""
        return self.stored_prompts().load(split, PROMPT_COLUMNS, wanted)


class EmbeddedSource(Source):
    """A source whose prompts and references are generated from a seed.

    Preference pairs are not generated: a prerequisite stage samples responses of the SFT model and labels
    them with the gold score.
    """

    pattern: ClassVar[str]  # regular expression that matches one token of a text
    words: ClassVar[tuple[str, ...]] = ()  # every token of the generated texts, without special tokens
    no_pairs = "pairs are sampled from its SFT model and labelled by gold"

    @abstractmethod
    def generate(self, split: str, size: int) -> dict[str, list[Any]]:
        """Return `size` examples as columns; see `Source.prompts`."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this vocabulary; decoding an encoded text returns exactly the text."""
        return word_tokenizer(self.vocabulary(), self.pattern)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token of the generated texts, without special tokens; `words`, unless overridden."""
        return cls.words

    def prompts(self, split: str, wanted: Wanted = NOTHING) -> Dataset:
        """Return the columns `query` and `reference_response` of a split, generated or from `task.path`."""
        if self.config.path is not None:
            return self.stored_prompts().load(split, PROMPT_COLUMNS, wanted)
        rows = Dataset.from_dict(self.generate(split, getattr(self.config, f"{split}_size")))
        if not wanted:
            return rows
        wanted.read(rows.column_names, rows.column_names, f"task={self.config.name}")
        return rows.add_column(RECORD, [wanted.record(row) for row in rows])


# Storage of the rows of a task: in memory or in a temporary folder, never beside the data of the user.


CHUNK = 10_000  # rows that are converted to a table at a time
IN_MEMORY = 50_000_000  # bytes of rows that are stored in memory; more rows are stored in a file


def from_rows(rows: Rows) -> Dataset:
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
    others = [name for name, value in first[1].items() if not isinstance(value, str)]
    schema = pyarrow.schema(
        {name: Json().pa_type if name in others else pyarrow.string() for name in (*first[1], "place")}
    )

    def stored(place: str, row: Row) -> Row:
        return row | {name: json.dumps(row[name]) for name in others} | {"place": place}

    def tables() -> Iterator[pyarrow.Table]:
        every = chain([first], rows)
        while chunk := [stored(*each) for each in islice(every, CHUNK)]:
            yield pyarrow.Table.from_pylist(chunk, schema)

    made = tables()
    small: list[pyarrow.Table] = []
    for table in made:
        small.append(table)
        if sum(each.nbytes for each in small) > IN_MEMORY:
            break
    else:
        return Dataset(pyarrow.concat_tables(small))
    file = f"{scratch().name}/rows-{uuid4().hex}.arrow"
    try:
        with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            for table in chain(small, made):
                writer.write_table(table)
    except OSError as error:
        raise UserError(
            "TMPDIR must be a folder with room for rows that are not stored in memory "
            f"({error.strerror or error}), got {gettempdir()}; run: export TMPDIR=<folder on a disk>"
        ) from None
    return Dataset.from_file(file)


def numbered(dataset: Dataset, name: str, columns: Collection[str] | None = None) -> Rows:
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
    return {"cache_file_name": f"{scratch().name}/{uuid4().hex}.arrow", "load_from_cache_file": False}


@cache
def scratch() -> TemporaryDirectory[str]:
    """Return the folder of this process for rows that are too large for memory; removed at its end."""
    return TemporaryDirectory(prefix="rlhf-data-")


def is_text(dataset: Dataset, column: str) -> bool:
    """Return whether a data set has a column of texts without missing values."""
    if column not in dataset.column_names:
        return False
    kind = getattr(dataset.features[column], "dtype", "")
    return kind in ("string", "large_string") and not dataset.data.column(column).null_count


# The tokenizer of the embedded tasks: one token per word of the generated texts.


SPECIAL = EOS, PAD, UNK = "<|endoftext|>", "<|padding|>", "<|unknown|>"


def word_tokenizer(vocabulary: Sequence[str], pattern: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word.

    Args:
        vocabulary: the words, in the order of their token ids after EOS, PAD and UNK. A word should include
            the space before it, so that decoding returns exactly the encoded text.
        pattern: regular expression that matches one word of a text.
    """
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
