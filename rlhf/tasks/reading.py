"""Rows of local data files (JSON Lines, JSON, CSV, Parquet), with errors that name the line.

This module imports no torch and no `datasets`, so that data can be checked before a run starts.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf.core.errors import UserError
from rlhf.tasks.formats import Row, Written, rows_of_table

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


def rows(file: Path, key: str, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
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
        for place, row in _parsed(file, key, columns):
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


def _parsed(file: Path, key: str, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
    suffix = suffix_of(file)
    if suffix == ".parquet":
        return _parquet_rows(file, key, columns)
    return _csv_rows(file, key) if suffix == ".csv" else _json_rows(file, key)


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
    first = True
    for number, line in lines:
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            yield from _array("\n" * (number - 1) + line + "".join(text for _, text in lines), file, key)
            return
        place = f"line {number} of {file}"
        try:
            row = json.loads(line, parse_float=Written)
        except (ValueError, RecursionError) as error:
            reason, remedy = _reason(error), "correct or remove the line"
            if first and line.strip() == "{" and (table := _table(line + "".join(text for _, text in lines))):
                yield from _numbered(table, file, key)
                return
            if first and line.strip() == "{":
                reason, remedy = "an object over several lines", "write the rows as an array: [{...}, {...}]"
            elif first and line.lstrip()[0] != "{":
                reason = repr(line.strip()[:40])
                remedy += "; if the file is CSV, change its suffix to .csv"
            raise UserError(
                f"{key} must contain one JSON object per line, got {place} ({reason}); {remedy}"
            ) from None
        if first and (table := rows_of_table(row)):
            yield from _numbered(table, file, key)
            return
        if first and (name := _wrapper(row)):
            raise UserError(
                f"{key} must contain an array of rows, got {place} with an object whose {name} is an array; "
                "write that array alone to the file"
            )
        first = False
        yield place, _object(row, place, key)


def _wrapper(row: Any) -> str | None:
    """Return the key of an array of rows in an object that is no row itself, or None."""
    found = row.items() if isinstance(row, dict) else ()
    arrays = (name for name, value in found if name in _WRAPPERS and isinstance(value, list) and value)
    return next((name for name in arrays if all(isinstance(each, dict) for each in row[name])), None)


def _array(text: str, file: Path, key: str) -> Iterator[tuple[str, Row]]:
    try:
        objects = json.loads(text, parse_float=Written)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(
            f"{key} must contain an array of JSON objects, got line {line} of {file} ({_reason(error)}); "
            "correct the file"
        ) from None
    yield from _numbered(objects, file, key)


def _numbered(objects: Sequence[Any], file: Path, key: str) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(objects, 1):
        place = f"row {number} of {file}"
        yield place, _object(row, place, key)


def _table(text: str) -> list[Row] | None:
    """Return the rows of a JSON text that is a table of pandas, see `rows_of_table`; None: it is not."""
    try:
        return rows_of_table(json.loads(text, parse_float=Written))
    except (ValueError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    """Return what is wrong with a JSON text, in a few words."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error).partition(";")[0]
    if error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip()):
        return "the text is cut off"
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _object(row: Any, place: str, key: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(
            f"{key} must contain JSON objects with named columns, got {place} with {described(row)}; write "
            '{"prompt": "..."} or other named columns'
        )
    return row


def _csv_rows(file: Path, key: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line for _, line in _lines(file, key)), strict=True)
    header: list[str] = []
    while True:
        place = f"line {reader.line_num + 1} of {file}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{key} must contain CSV with commas and double quotes, got {place} ({error}); correct the "
                "line"
            ) from None
        if not header:
            header = [name.strip() for name in cells]
            if len(header) == 1 and re.search(r"[;\t|]", header[0]):
                raise UserError(
                    f"{key} must have commas between the cells of CSV files, got {place} with {header[0]!r}; "
                    "save the file with commas"
                )
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise UserError(
                    f"{key} must have columns with different names, got {place} with {repeated[0]!r} twice; "
                    "rename one of them"
                )
        elif len(cells) == len(header):
            yield place, dict(zip(header, cells, strict=True))
        elif cells:
            raise UserError(
                f"{key} must have as many cells in each row as in the header ({len(header)}), got {place} "
                f"with {len(cells)}; put texts that contain commas or line breaks in double quotes"
            )


def _parquet_rows(file: Path, key: str, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            read = names if columns is None else [name for name in names if name in columns]
            batches = opened.iter_batches(1000, columns=read)
            for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
                yield f"row {number} of {file}", {name: without_nulls(value) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{key} must contain readable Parquet files, got {file} ({str(error).splitlines()[0]}); write or "
            "copy the file again"
        ) from None


def without_nulls(value: Any) -> Any:
    """Return a value without the null entries of its objects, which Arrow adds for the keys of other rows."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def described(value: Any) -> str:
    """Return the JSON type of a value, and the value if it is short, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    kind = kinds.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
    return f"{kind} ({value})" if isinstance(value, int | float) and len(str(value)) < 20 else kind
