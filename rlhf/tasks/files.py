"""The files of task data: rows with their lines, splits, columns, checks before a run. No torch."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.algorithms import Data
from rlhf.config.tasks import ColumnsConfig, TaskConfig
from rlhf.core.errors import UserError, literal, python_command, setting
from rlhf.tasks.columns import TOOLS, Written, conversion, converted, described, is_dialogue, note, recognise

if TYPE_CHECKING:
    import pyarrow

    from rlhf.tasks.columns import Convert, Layout, Row, Rows

# Rows of local data files (JSON Lines, JSON, CSV, Parquet), with errors that name the line.


_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FORMATS = ".jsonl, .json, .csv (also with .gz) or .parquet"  # for messages
_WRAPPERS = ("data", "rows", "examples", "items", "train")  # usual names of an array of rows in an object
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # name of a part of a split, as on the hub


def _suffix_of(file: Path) -> str | None:
    """Return the suffix of a file that `rows` can read, in lower case and without .gz; None for others."""
    name = file.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    compressed = name.endswith(".gz")
    return suffix if suffix in _SUFFIXES and not (compressed and suffix == ".parquet") else None


def stem(file: Path) -> str:
    """Return the name of a data file without its suffix and without .gz."""
    name = file.name[:-3] if file.name.lower().endswith(".gz") else file.name
    return Path(name).stem


def rows(file: Path, key: str, columns: Collection[str] | None = None) -> Rows:
    """Yield the rows of a data file, each with its place for messages, such as "line 3 of x.jsonl".

    Args:
        file: a file with one of the suffixes of `FORMATS`; text must be UTF-8, with or without BOM.
        key: config key that names the data, for error messages.
        columns: the columns that the caller reads, if known; other columns of a Parquet file are skipped.

    Raises:
        UserError: the file is empty or cannot be read, or a row is not an object with named columns.
    """
    try:
        if file.stat().st_size == 0:
            raise UserError(
                f"{key} must contain rows, got {file}, which is empty (0 bytes); write the file again"
            )
        found = False
        suffix = _suffix_of(file)
        parse = _csv_rows if suffix == ".csv" else _json_rows
        for place, row in _parquet_rows(file, key, columns) if suffix == ".parquet" else parse(file, key):
            found = True
            yield place, row
    except OSError as error:  # no permission, or a disk error
        raise UserError(
            f"{key} must name files that can be read, got {file} ({error.strerror or error}); check its "
            "permissions"
        ) from None
    if not found:
        raise UserError(
            f"{key} must contain rows, got {file}, which is empty (no rows); write the file again"
        )


def _lines(file: Path, key: str) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.name.lower().endswith(".gz") else file.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        likely = "utf-16" if number == 1 and error.object[:2] in _UTF_16_MARKS else "latin1"
        raise UserError(
            f"{key} must contain text in UTF-8, got line {number} of {file} with the byte 0x{byte:02x}; save "
            f"the file as UTF-8 (it is probably {likely}: iconv -f {likely} -t utf-8 "
            f"{shlex.quote(str(file))} > <new file>)"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        if number == 0 and "Not a gzipped file" in str(error):
            raise UserError(
                f"{key} must contain gzip files under names with .gz, got {file}, which is not compressed; "
                f"rename it to {file.with_suffix('').name}"
            ) from None
        raise UserError(
            f"{key} must contain complete gzip files, got {file}, which is damaged after line {number} "
            f"({error}); compress or copy the file again"
        ) from None


def _json_rows(file: Path, key: str) -> Rows:
    lines = _lines(file, key)
    number, line = next((each for each in lines if each[1].strip()), (0, ""))
    start = line.strip()
    array, divided = start.startswith("["), start == "{"  # `divided`: a table over several lines, or no row
    rule, remedy = "one JSON object per line", "correct or remove the line"
    if array:
        rule, remedy = "an array of JSON objects", "correct the file"
    elif divided:
        remedy = "write the rows as an array: [{...}, {...}]"
    elif not start.startswith("{"):
        remedy += "; if the file is CSV, change its suffix to .csv"
    if array or divided:
        line = "\n" * (number - 1) + line + "".join(text for _, text in lines)

    def refused(number: int, reason: str) -> UserError:
        return UserError(f"{key} must contain {rule}, got line {number} of {file} ({reason}); {remedy}")

    def read(text: str, number: int) -> Any:
        try:
            return json.loads(text, parse_float=Written)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(";")[0]
            if divided:
                reason = "an object over several lines"
            elif not text.lstrip().startswith(("[", "{")):
                reason = repr(text.strip()[:40])
            elif isinstance(error, json.JSONDecodeError):
                cut = error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip())
                found = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                reason = "the text is cut off" if cut else found
            raise refused(getattr(error, "lineno", 1) if array else number, reason) from None

    def checked(row: Any, place: str) -> tuple[str, Row]:
        if isinstance(row, dict):
            return place, row
        raise UserError(
            f"{key} must contain JSON objects with named columns, got {place} with {described(row)}; write "
            '{"prompt": "..."} or other named columns'
        )

    if not start:
        return
    first = read(line, number)
    if (table := first if isinstance(first, list) else _rows_of_table(first)) is not None:
        for number, row in enumerate(table, 1):
            yield checked(row, f"row {number} of {file}")
        return
    for name in _WRAPPERS if isinstance(first, dict) else ():
        if isinstance(rows := first.get(name), list) and rows and all(isinstance(row, dict) for row in rows):
            raise UserError(
                f"{key} must contain an array of rows, got line {number} of {file} with an object whose "
                f"{name} is an array; write that array alone to the file"
            )
    if divided:
        raise refused(number, "an object over several lines")
    yield checked(first, f"line {number} of {file}")
    for number, line in lines:
        if line.strip():
            yield checked(read(line, number), f"line {number} of {file}")


def _csv_rows(file: Path, key: str) -> Rows:
    csv.field_size_limit(sys.maxsize)
    record: list[str] = []  # the lines of the current row
    lines = (record.append(line) or line for _, line in _lines(file, key))  # type: ignore[func-returns-value]
    first = next(lines, "")
    if "," not in first and re.search(r"[;\t|]", first):
        raise UserError(
            f"{key} must have commas between the cells of CSV files, got line 1 of {file} with "
            f"{first.strip()!r}; save the file with commas"
        )
    if blanks := any(name.startswith(" ") for name in next(csv.reader([first]), [])):
        note(f"blanks after the commas of {file.name} are left out of all cells, as its first line has them")
    reader = csv.reader(chain([first], lines), strict=True, skipinitialspace=blanks)
    header: list[str] = []
    start = 1  # the line in which the next row starts
    try:
        for cells in reader:
            place, start = f"line {start} of {file}", reader.line_num + 1
            written = "," + "".join(record)
            record.clear()
            if quoted := [each for each in cells if re.match(r'\s+"', each) and f",{each}" in written]:
                raise UserError(
                    f"{key} must have no blank before a cell in double quotes, got {place} with "
                    f"{quoted[0][:20]!r}; remove the blank, or write one after the commas of line 1, too"
                )
            if not header:
                header = [name.strip() for name in cells]
                if repeated := sorted({name for name in header if header.count(name) > 1}):
                    raise UserError(
                        f"{key} must have columns with different names, got {place} with {repeated[0]!r} "
                        "twice; rename one of them"
                    )
            elif len(cells) == len(header):
                yield place, dict(zip(header, cells, strict=True))
            elif "".join(cells).strip():
                raise UserError(
                    f"{key} must have as many cells in a row as in the header ({len(header)}), got {place} "
                    f"with {len(cells)}; put texts with commas or line breaks in straight double quotes"
                )
    except csv.Error as error:
        raise UserError(
            f"{key} must contain CSV with commas and double quotes, got line {start} of {file} ({error}); "
            'correct the line ("" is a double quote inside a text; no blank follows a closing one)'
        ) from None


def _rows_of_table(value: Any) -> list[Row] | None:
    """Return the rows of a table that pandas wrote (`DataFrame.to_json`); None: it is no table.

    The forms are {"column": {"0": value, ...}, ...}, {"0": {"column": value, ...}, ...} and
    {"columns": [...], "index": [...], "data": [[...]]}.
    """
    if not isinstance(value, dict) or not value:
        return None
    if value.keys() == {"columns", "index", "data"} and all(
        isinstance(each, list) for each in value.values()
    ):
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    columns = list(value.values())
    if not all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        return None
    if columns[0] and all(str(index).isdigit() for index in value):
        return columns  # the rows
    if not columns[0] or not all(str(index).isdigit() for index in columns[0]):
        return None
    return [{name: column[index] for name, column in value.items()} for index in columns[0]]


def _arrow_rows(file: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file or of an Arrow file of a saved data set; see `rows_of_arrow`.

    Args:
        file: the file; files of other suffixes than .parquet are streams of Arrow.
        columns: the columns to read, if the file has them; None: all columns.

    Raises:
        pyarrow.ArrowException, OSError, ValueError: the file is damaged.
    """
    import pyarrow.parquet

    def kept(schema: pyarrow.Schema) -> list[str]:
        return [name for name in schema.names if columns is None or name in columns]

    if file.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(1000, columns=kept(opened.schema_arrow)):
                yield from rows_of_arrow(batch)
    else:
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from rows_of_arrow(batch.select(kept(batch.schema)))


def _parquet_rows(file: Path, key: str, columns: Collection[str] | None) -> Rows:
    import pyarrow

    try:
        for number, row in enumerate(_arrow_rows(file, columns), 1):
            yield f"row {number} of {file}", row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{key} must contain readable Parquet files, got {file} ({str(error).splitlines()[0]}); write or "
            "copy the file again"
        ) from None


def rows_of_arrow(table: pyarrow.RecordBatch | pyarrow.Table) -> Iterator[Row]:
    """Yield the rows of a table of Arrow as JSON Lines would have them, with decoded JSON (`datasets.Json`).

    A struct has the keys of all rows, and null for those that a row lacks. These nulls remain, except in
    dialogues and tools, where they count as absent. JSON keeps its own keys and nulls everywhere.
    """
    import pyarrow

    def decoded(value: Any, kind: pyarrow.DataType, bare: bool) -> Any:
        if isinstance(kind, pyarrow.JsonType):
            return value if value is None else json.loads(value, parse_float=Written)
        if isinstance(value, dict) and isinstance(kind, pyarrow.StructType):
            kept = {name: each for name, each in value.items() if not (bare and each is None)}
            return {name: decoded(each, kind.field(name).type, bare) for name, each in kept.items()}
        if isinstance(value, list) and hasattr(kind, "value_type"):
            return [decoded(each, kind.value_type, bare) for each in value]
        return value

    kinds = {field.name: field.type for field in table.schema}
    for row in table.to_pylist(maps_as_pydicts="strict"):
        yield {
            name: decoded(value, kinds[name], name.lower() == TOOLS or is_dialogue(value))
            for name, value in row.items()
        }


# The splits of local data.


_ALIASES = {"train": ("training",), "validation": ("val", "valid", "dev", "eval"), "test": ("testing",)}
SCANNED_BYTES = 50e6  # files of a split up to this size are read completely before a run starts


class Splits:
    """The splits of local data, in one of three forms. This module imports no `datasets`.

    - A folder that `datasets.save_to_disk` wrote, from a DatasetDict or from a Dataset (the split `train`).
    - A folder with one file per split: `train.jsonl`, `validation.parquet`, or parts of a split as on the hub
      (`train-00000-of-00002.parquet`).
    - One file, which is the split `train`.

    Args:
        path: the folder or file, as the user names it.
        key: config key that names the data, for error messages.

    Attributes:
        path: the folder or file.
        saved: `datasets.save_to_disk` wrote the folder.
        files: name of a split -> its file, or its parts in their order.

    Raises:
        UserError: a split has two files, or lacks a part, or a saved data set is damaged.
    """

    def __init__(self, path: str, key: str) -> None:
        self.named, self.key = path, key
        self.path = Path(path).expanduser()
        self.saved = any((self.path / f"dataset_{each}.json").is_file() for each in ("dict", "info"))
        self.files: dict[str, list[Path]] = {}
        self._columns: dict[str, list[str]] = {}
        if self.saved:
            try:
                folders = {"train": self.path}
                if (listed := self.path / "dataset_dict.json").is_file():
                    folders = {each: self.path / each for each in json.loads(listed.read_text())["splits"]}
                for split, folder in folders.items():
                    state = json.loads((folder / "state.json").read_text())
                    info = json.loads((folder / "dataset_info.json").read_text())
                    self.files[split] = [folder / each["filename"] for each in state["_data_files"]]
                    self._columns[split] = list(info["features"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise self.damaged(error) from None
        elif self.path.is_file():
            self.files = {"train": [self.path]}
        else:
            self._find_files()

    def _find_files(self) -> None:
        totals: dict[str, int] = {}
        for file in sorted(self.path.iterdir()):
            if _suffix_of(file) is None or not file.is_file():
                continue
            part = SHARD.fullmatch(stem(file))
            split = part[1] if part else stem(file)
            if split in self.files and not (part and split in totals):
                raise UserError(
                    f"{self.key} must contain one file per split, got {self.path} with "
                    f"{self.files[split][0].name} and {file.name}; remove or rename one of them"
                )
            self.files.setdefault(split, []).append(file)
            if part:
                totals[split] = int(part[3])
        for split, total in totals.items():
            if len(self.files[split]) != total:
                raise UserError(
                    f"{self.key} must contain all parts of a split, got {self.path} with "
                    f"{len(self.files[split])} of {total} parts of {split}; copy the missing files"
                )

    def damaged(self, error: Exception) -> UserError:
        """Return the error for a saved data set that cannot be read because of `error`."""
        return UserError(
            f"{self.key} must contain a complete data set of datasets.save_to_disk, got {self.path} "
            f"({type(error).__name__}: {error}); save the data set again"
        )

    def stored(self, split: str) -> str | None:
        """Return the name under which a split is stored: its own, or another usual one; None: not stored.

        Raises:
            UserError: its own name is missing, and there are two other usual names.
        """
        if split in self.files:
            return split
        usual = [name for name in self.files if name.lower() in (split, *_ALIASES.get(split, ()))]
        if len(usual) > 1:
            raise UserError(
                f"{self.key} must contain one split for {split}, got {' and '.join(usual)}; rename one to "
                f"{split}"
            )
        return usual[0] if usual else None

    def columns(self, name: str) -> list[str]:
        """Return the columns of the split that is stored as `name`; of files, those of the first row.

        Raises:
            UserError: the first row cannot be read.
        """
        return self._columns[name] if self.saved else list(next(self.rows(name))[1])

    def rows(self, name: str, columns: Collection[str] | None = None) -> Rows:
        """Yield the rows of the split that is stored as `name`, each with its place for messages.

        Args:
            name: name of the split.
            columns: the columns that the caller reads, if known; others may be missing in the rows.

        Raises:
            UserError: a file cannot be read, or has no rows; see `rows`.
        """
        if not self.saved:
            yield from chain.from_iterable(rows(file, self.key, columns) for file in self.files[name])
            return
        import pyarrow

        number = 0
        try:
            found = chain.from_iterable(_arrow_rows(file, columns) for file in self.files[name])
            for number, row in enumerate(found, 1):
                yield f"row {number} of the split {name} of {self.named}", row
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self.damaged(error) from None
        if number == 0:
            raise UserError(
                f"{self.key} must contain rows, got the split {name} of {self.named}, which is empty; save "
                "the data set again"
            )

    def present(self, names: Iterable[str]) -> str:
        """Return what is stored, `names`, and what is not read, for a message about a missing split."""
        found = ", ".join(names) or "no data file"
        if self.saved or not self.path.is_dir():
            return found
        others = [
            each for each in sorted(self.path.iterdir()) if each.suffix != ".md" and each.name[0] != "."
        ]
        unread = [each.name for each in others if each.is_file() and _suffix_of(each) is None]
        readable = [each for each in others if _suffix_of(each)]
        unread += [f"{each.name}, which is a folder" for each in readable if each.is_dir()]
        unread += [f"{each.name}, which is a broken link" for each in readable if not each.exists()]
        return found + (f" (not read: {', '.join(unread[:3])}; the formats are {FORMATS})" if unread else "")

    def problems_with(
        self, columns: Iterable[str], splits: Iterable[str], reason: str, whole: bool = True
    ) -> Iterator[str]:
        """Yield an error message for each problem of a reader with fixed columns.

        Args:
            columns: required columns of every split.
            splits: required splits.
            reason: why the run needs the folder, for error messages.
            whole: check all rows of files that are not too large; False: only the columns of the first row.

        Raises:
            UserError: the first row of a split cannot be read, or the choice of a split is not clear.
        """
        required, local = tuple(columns), self.key == "task.path"
        for split in splits:
            if (name := self.stored(split)) is None:
                remedy = f"add {split}.jsonl with the columns {', '.join(required)}"
                if local and split != "train" and self.files:
                    remedy += ", or set task=local, which splits off rows"
                yield (
                    f"{self.key} must contain the split {split} ({reason}), got {self.named} with "
                    f"{self.present(self.files)}; {remedy}"
                )
            elif missing := lacking(required, found := self.columns(name)):
                place = self.named if self.saved else self.files[name][0]
                other = ", or set task=local, which recognizes other names" if local else ""
                yield (
                    f"{self.key} must have the columns {', '.join(required)} in its split {split} "
                    f"({reason}), got {place} with {', '.join(found) or 'none'}; rename or add "
                    f"{', '.join(missing)}{other}"
                )
            elif whole and (problem := self.scan(name, required, conversion(required))[0]):
                yield problem

    def scan(self, name: str, columns: Sequence[str], convert: Convert) -> tuple[str | None, bool]:
        """Return the error message for the first row of a split that `convert` refuses, or None.

        Returns:
            The message, and whether all rows have the same prompt. Files that are too large for a check
            before the run are not read; their rows are checked when the run loads them.
        """
        states = [(file.name.lower(), file.stat()) for file in self.files[name] if file.exists()]
        if sum(state.st_size * (5 if file.endswith(".gz") else 1) for file, state in states) > SCANNED_BYTES:
            return None, False
        stamps = tuple((state.st_mtime_ns, state.st_size) for _, state in states)
        return _scan(self.named, self.key, name, tuple(columns), convert, stamps)


@lru_cache(maxsize=64)  # the jobs of a sweep read the same files
def _scan(
    path: str, key: str, name: str, columns: tuple[str, ...], convert: Convert, stamps: object
) -> tuple[str | None, bool]:
    first, differ = None, False
    try:
        for number, (_, row) in enumerate(converted(Splits(path, key).rows(name, columns), convert, key)):
            prompt = next((row[each] for each in ("query", "messages", "prompt") if each in row), None)
            first = first if number else prompt
            differ |= prompt != first
    except UserError as error:
        return error.problems[0], False
    return None, not differ


def lacking(required: Collection[str], present: Collection[str]) -> list[str]:
    """Return the required columns that are not present; `chosen` may contain the prompt of a pair."""
    missing = [column for column in required if column not in present]
    return [] if missing == ["prompt"] and "chosen" in required else missing


def data_folder(key: str, path: str, reason: str) -> Splits:
    """Return the splits of a data folder.

    Args:
        key: config key that names the folder, for error messages.
        path: the folder.
        reason: why the run needs the folder, for error messages.

    Raises:
        UserError: there is no such folder, or see `Splits`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return Splits(path, key)
    state, remedy = "no such folder", f"set {key}=<folder>"
    if folder.exists():
        state = "a file"
        if key == "task.path":
            remedy = f"set task=local {setting('task.path', path)}, or {key}=<folder>"
    elif near := _similar(folder):
        remedy = f"did you mean {setting(key, near)}?"
    raise UserError(
        f"{key} must be a folder with one .jsonl, .json, .parquet or .csv file per split, or a folder "
        f"written by datasets.save_to_disk ({reason}), got {path} ({state}); {remedy}"
    )


def _similar(path: Path) -> Path | None:
    """Return the existing file or folder beside a missing path with the closest name, or None."""
    if not path.parent.is_dir():
        return None
    close = get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return path.parent / close[0] if close else None


def folder_problems(
    key: str, path: str, columns: Iterable[str], splits: Iterable[str], reason: str
) -> Iterator[str]:
    """Yield an error message for each problem of a data folder; see `data_folder`, `Splits.problems_with`."""
    try:
        yield from data_folder(key, path, reason).problems_with(columns, splits, reason)
    except UserError as error:
        yield from error.problems


KEY = "task.path"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class LocalFiles(Splits):
    """The data that `task.path` names for `task=local`, whose columns are recognised.

    Args:
        path: `task.path`.
        columns: names of columns that are not recognised.
        chat: whether prompts that are texts are messages of the user.

    Raises:
        UserError: there is no such file or folder, or it has no training rows.
    """

    def __init__(self, path: str, columns: ColumnsConfig, chat: bool = False) -> None:
        self.named_columns, self.chat = columns, chat
        place = Path(path).expanduser()
        if not place.exists():
            remedy = f"set {KEY}=<file or folder>"
            if near := _similar(place):
                remedy = f"did you mean {setting(KEY, near)}?"
            elif HUB_NAME.fullmatch(path) and not place.parent.is_dir():
                saved = f"data/{place.name}"
                code = f"load_dataset({literal(path)}).save_to_disk({literal(saved)})"
                command = python_command(f"from datasets import load_dataset; {code}")
                remedy = f"save a data set of the hub first: {command}, then set {setting(KEY, saved)}"
            raise UserError(
                f"{KEY} must name a file or folder of data, got {path} (no such file or folder); {remedy}"
            )
        if place.is_file() and _suffix_of(place) is None:
            raise UserError(
                f"{KEY} must name a file with a suffix that can be read ({FORMATS}), got {path}; "
                "save the data in one of these formats"
            )
        super().__init__(str(place), KEY)
        if self.stored("train") is None:
            files = [] if self.saved else [file for files in self.files.values() for file in files]
            remedy = f"set {setting(KEY, files[0])}" if len(files) == 1 else "add a file train.jsonl"
            present = self.present([file.name for file in files] or self.files)
            raise UserError(f"{KEY} must contain the split train, got {self.path} with {present}; {remedy}")

    def layout(self, split: str, data: Data) -> Layout:
        """Return the columns of a stored split by their role.

        Raises:
            UserError: the columns lack what an example of the kind `data` needs.
        """
        name = self.stored(split)
        assert name is not None
        place = f"{self.path} (split {name})" if self.saved else str(self.files[name][0])
        found = recognise(self.columns(name), self.named_columns, data, KEY, place)
        return replace(found, chat=self.chat)

    def first(self) -> tuple[Layout, Row]:
        """Return the columns of the training rows, and the first row after its conversion.

        Raises:
            UserError: the first row cannot be used.
        """
        layout, name = self.layout("train", Data.prompts), self.stored("train") or "train"
        return layout, next(converted(self.rows(name, layout.names), layout.example, KEY))[1]

    @property
    def first_prompt(self) -> str | None:
        """The first prompt if it is a text that the response does not repeat.

        Raises:
            UserError: the first row cannot be used.
        """
        layout, row = self.first()
        prompt: str | None = row.get("query")
        if layout.prompt is None or (prompt and str(row["reference_response"]).startswith(prompt)):
            return None
        return prompt

    def problems(self, data: Data) -> Iterator[str]:
        """Yield an error message for each stored split whose columns or rows a run cannot use.

        Args:
            data: what a training example of the run contains.
        """
        for split in ("train", "validation"):
            if (name := self.stored(split)) is None:
                continue
            try:
                layout = self.layout(split, data)
            except UserError as error:
                yield from error.problems
                continue
            problem, one_prompt = self.scan(name, layout.names, layout.conversion(data))
            if problem is not None:
                yield problem
            elif one_prompt and split == "train" and self.stored("validation") is None:
                yield self.one_prompt()

    def one_prompt(self) -> str:
        """Return the error message for training rows with one prompt, of which none can be split off."""
        return (
            f"{KEY} must contain at least two different prompts (some rows are split off for validation), "
            f"got {self.path} with one prompt; add rows, or a file validation.jsonl beside train.jsonl"
        )


def has_dialogues(task: TaskConfig) -> bool | None:
    """Return whether the prompts of a task are known to be dialogues before any data set is loaded.

    Args:
        task: config section of the task.

    Returns:
        None if only the rows of the data set show it, if local data cannot be read, or if parts differ.
    """
    if task.own_files is not None:
        try:
            return "messages" in LocalFiles(*task.own_files).first()[1]
        except UserError:
            return None  # the checks of the data report it
    known = {has_dialogues(part) for part in task.parts.values()} or {task.dialogues}
    return None if len(known) > 1 else known.pop()


def different_forms(dialogues: str, texts: str) -> str:
    """Return the error message for a part with dialogues and a part with texts."""
    return (
        "task.parts must all have dialogues or all have texts (responses end differently), got dialogues in "
        f"{dialogues} and texts in {texts}; convert one of them, or leave it out"
    )
