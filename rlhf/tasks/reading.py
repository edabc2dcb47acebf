"""Rows of local data files: their reading, the forms of texts and dialogues, columns for reward functions."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import logging
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError
from rlhf.usercode.address import GIVEN

if TYPE_CHECKING:
    import pyarrow


# Rows of local data files (JSON Lines, JSON, CSV, Parquet), with errors that name the line.
#
# This module imports no torch and no `datasets`, so that data can be checked before a run starts.


_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FORMATS = ".jsonl, .json, .csv (also with .gz) or .parquet"  # for messages
_WRAPPERS = ("data", "rows", "examples", "items", "train")  # usual names of an array of rows in an object
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # name of a part of a split, as on the hub


def suffix_of(file: Path) -> str | None:
    """Return the suffix of a file that `rows` can read, in lower case and without .gz; None for others."""
    name = file.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    compressed = name.endswith(".gz")
    return suffix if suffix in _SUFFIXES and not (compressed and suffix == ".parquet") else None


def stem(file: Path) -> str:
    """Return the name of a data file without its suffix and without .gz."""
    name = file.name[:-3] if file.name.lower().endswith(".gz") else file.name
    return Path(name).stem


def rows(file: Path, key: str, columns: Collection[str] | None = None) -> Iterator[tuple[str, Row]]:
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
        suffix = suffix_of(file)
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


def _json_rows(file: Path, key: str) -> Iterator[tuple[str, Row]]:
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
            return json.loads(text, parse_float=_Written)
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


def _csv_rows(file: Path, key: str) -> Iterator[tuple[str, Row]]:
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
        _note(f"blanks after the commas of {file.name} are left out of all cells, as its first line has them")
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
                    f"{key} must have no blank before a cell in double quotes (the quotes become part of the "
                    f"text), got {place} with {quoted[0][:20]!r}; remove the blank, or write a blank after "
                    "the commas of line 1, too, so that all are left out"
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
                    f"{key} must have as many cells in each row as in the header ({len(header)}), got "
                    f"{place} with {len(cells)}; put texts that contain commas or line breaks in straight "
                    "double quotes"
                )
    except csv.Error as error:
        raise UserError(
            f"{key} must contain CSV with commas and double quotes, got line {start} of {file} ({error}); "
            'correct the line ("" is a double quote inside a text; no blank follows a closing one)'
        ) from None


def arrow_rows(file: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
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


def _parquet_rows(file: Path, key: str, columns: Collection[str] | None) -> Iterator[tuple[str, Row]]:
    import pyarrow

    try:
        for number, row in enumerate(arrow_rows(file, columns), 1):
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
            return value if value is None else json.loads(value, parse_float=_Written)
        if isinstance(value, dict) and isinstance(kind, pyarrow.StructType):
            kept = {name: each for name, each in value.items() if not (bare and each is None)}
            return {name: decoded(each, kind.field(name).type, bare) for name, each in kept.items()}
        if isinstance(value, list) and hasattr(kind, "value_type"):
            return [decoded(each, kind.value_type, bare) for each in value]
        return value

    kinds = {field.name: field.type for field in table.schema}
    for row in table.to_pylist(maps_as_pydicts="strict"):
        yield {
            name: decoded(value, kinds[name], name.lower() == TOOLS or _is_dialogue(value))
            for name, value in row.items()
        }


def described(value: Any) -> str:
    """Return the JSON type of a value, and the value if it is short, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    other = "an object" if isinstance(value, dict) else type(value).__name__
    kind = next((kinds[each] for each in kinds if isinstance(value, each)), other)
    return f"{kind} ({value})" if isinstance(value, int | float) and len(str(value)) < 20 else kind


# Forms in which data sets store texts and dialogues, and their conversion.


log = logging.getLogger(__name__)

Row = dict[str, Any]
TOOLS = "tools"  # column beside messages: the functions that the assistant may call, as JSON schemas
_ASSISTANT = "\n\nAssistant:"  # before each answer in dialogues that are one text, as in hh-rlhf


@dataclass(eq=False)
class BadRow(Exception):
    """A row without the required content; the caller adds the key and the place to the message."""

    rule: str  # what the data must have, after "<key> must"
    got: str  # what the row has, after the place of the row
    remedy: str = "correct or remove that row"

    def problem(self, key: str, place: str) -> str:
        """Return the error message for the row at `place` of the data that `key` names."""
        return f"{key} must {self.rule}, got {place} {self.got}; {self.remedy}"


class _Written(float):
    """A number of a JSON file that has its digits, such as 1.50 or 1e3, as text."""

    written: str

    def __new__(cls, text: str) -> _Written:
        """Return the number that a text means."""
        made = super().__new__(cls, text)
        made.written = text
        return made

    def __str__(self) -> str:
        return self.written


def number_as_text(value: Any, column: str) -> str | None:
    """Return a number as text, as it is written in the data; None: the value is no number.

    Of a number with a fraction, only JSON has the digits. Other formats store it in binary.
    """
    if isinstance(value, bool) or not isinstance(value, int | _Written):
        return None
    _note(f"numbers in the column {column} are read as text, as they are written")
    return str(value)


@lru_cache
def _note(text: str) -> None:
    """Say once how data are read."""
    log.warning("%s", text)


def parsed(row: Row) -> Row:
    """Return a row with lists of messages in place of their texts in JSON, or as Python prints them."""
    return {name: _messages_of(value) for name, value in row.items()}


def _messages_of(value: Any) -> Any:
    """Return the messages that a text contains, or the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or "{" not in value:
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return found if _is_dialogue(found) else value
    return value


def _is_dialogue(value: Any) -> bool:
    """Return whether a value is a list of messages: of objects with a role."""
    found = value if isinstance(value, list) else []
    return found != [] and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in found)


def without_prompt(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """Return the prompt and the two answers of a pair of whole dialogues, each one text; None: not so.

    The prompt ends with the last `_ASSISTANT` of the part that both texts share, as in hh-rlhf.
    """
    before, mark, _ = os.path.commonprefix([chosen, rejected]).rpartition(_ASSISTANT)
    end = len(before) + len(mark)
    return (chosen[:end], chosen[end:], rejected[end:]) if mark else None


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


# Columns of the data that reward functions ask for. They travel with a prompt as its record.
#
# A source adds the column `record` to its rows: the columns of the row that a function asks for, as JSON
# text. Without such a function, there is no record.


RECORD = "record"


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The columns of the data that the reward functions of a run ask for.

    Attributes:
        columns: name of a column -> config key and address of a function that cannot do without the column.
        optional: names of columns that a function receives if the data have them.
        rest: a function receives all columns (`**kwargs`).
        parts: the columns of each part of a mixture of tasks, by the name of the part.
        positions: name of a parameter that receives another value by position -> key, address and that value.
    """

    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    rest: bool = False
    parts: Mapping[str, Wanted] = field(default_factory=dict)
    positions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.asks or bool(self.positions) or any(self.parts.values())

    @property
    def asks(self) -> bool:
        """Whether a function asks for columns, so that rows have a record."""
        return bool(self.columns or self.optional or self.rest)

    def read(self, names: Collection[str], available: Collection[str], place: str) -> list[str] | None:
        """Return the columns of a file to read: `names` and those of the record; None: all columns.

        Args:
            names: columns that are read anyway.
            available: all columns of the data.
            place: the data, for messages.

        Raises:
            UserError: a function asks for a column that the data lack, or receives another value instead.
        """
        for name, (key, path, value) in self.positions.items():
            if name in available and (value == "response" or name not in names):
                raise UserError(
                    f"{key} must name a function with a parameter response if others are columns of the data "
                    f"(without it, {name} would be the {value}), got {path} for {place} with the column "
                    f"{name}; rename the parameter that is the response to response"
                )
        for name, (key, path) in self.columns.items():
            if name not in available:
                near = get_close_matches(name, available, n=1)
                remedy = f"did you mean {near[0]}?" if near else "rename the parameter, or give it a default"
                raise UserError(
                    f"{key} must name a function whose parameters are prompt, response, reference, messages "
                    f"or columns of the data ({', '.join(available)}), got {path} with the parameter {name}, "
                    f"which {place} lacks; {remedy}"
                )
        return None if self.rest else list(dict.fromkeys([*names, *self.columns, *self.optional]))

    def record(self, row: Row) -> str:
        """Return the columns of a row that functions ask for, as JSON text; dates and decimals become texts.

        Raises:
            BadRow: a column has binary data, such as an image.
        """
        kept = row.keys() - GIVEN if self.rest else {*self.columns, *self.optional}
        asked = {name: row[name] for name in row if name in kept}
        for name in filter(lambda name: _has_bytes(asked[name]), asked):
            rule = f"have texts, numbers, lists or objects in its column {name}, which a function receives"
            remedy = f"remove the column {name}, or write its texts as strings"
            raise BadRow(rule, "with bytes (such as an image or a sound)", remedy)
        return json.dumps(asked, default=str)

    def recording(self, convert: Callable[[Row], Row]) -> Callable[[Row], Row]:
        """Return the function `convert`, which also adds the record to a row."""
        return lambda row: {**convert(row), RECORD: self.record(row)} if self.asks else convert(row)


def _has_bytes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


NOTHING = Wanted()
