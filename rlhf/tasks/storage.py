"""Storage of the rows of a task: in memory or in a temporary folder, never beside the data of the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow
import pyarrow.compute
from datasets import Dataset, Json

from rlhf.core.errors import UserError
from rlhf.tasks.reading import rows_of_arrow

if TYPE_CHECKING:
    from rlhf.tasks.reading import Row

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
