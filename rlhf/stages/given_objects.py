"""Data sets and reward functions that are given as objects in Python. This module imports no torch."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.checks.machine import composed
from rlhf.core.errors import UserError, override
from rlhf.core.files import component, whole
from rlhf.core.formatting import shortened
from rlhf.runs.lock import creating
from rlhf.usercode.objects import Function, GivenFunctions

# Data sets and reward functions that are given to `Experiment` as objects.


def with_objects(
    overrides: Sequence[str], dataset: object, reward: Function | Sequence[Function] | None
) -> tuple[list[str], GivenFunctions | None]:
    """Store a data set in `cache_dir`, and return the overrides with its address and those of functions.

    Args:
        overrides: the other overrides.
        dataset: see `Experiment`; None: the overrides name the data.
        reward: see `Experiment`; None: the overrides name the scorer.

    Returns:
        The overrides, and the functions.

    Raises:
        UserError: the overrides name other data or another scorer, an object cannot be used, or `cache_dir`
            cannot be written.
    """
    words, functions = list(overrides), None
    for argument, given, option, path in (
        ("dataset", dataset, "task=local", "task.path"),
        ("reward", reward, "scorer=function", "scorer.path"),
    ):
        if given is None:
            continue
        for word in overrides:
            if word.startswith(f"{path}=") or (
                word.startswith(option.partition("=")[0] + "=") and word != option
            ):
                raise UserError(
                    f"{argument} must not be given together with {word} (both name the {argument}), got an "
                    f"object of type {type(given).__name__}; leave {word} out"
                )
        words = [*words, *([] if option in words else [option])]
    cache = Path(composed(words).cache_dir)
    with creating(cache, "cache_dir"):
        if dataset is not None:
            words.append(override("task.path", written(dataset, cache / "given_data")))
        if reward is not None:
            functions = GivenFunctions(reward)
            paths = functions.paths
            words.append(override("scorer.path", paths[0] if len(paths) == 1 else paths))
    return words, functions


# Data sets that are given as objects in Python: they are written as files, which `task=local` reads.
#
# The path of the files depends on their content only, so equal data give the same run, and a changed data
# set another one.


_ERRORS = (TypeError, ValueError, RecursionError)
_RULE = "dataset must be a datasets.Dataset, a datasets.DatasetDict or a list of dicts"


def written(dataset: object, folder: Path) -> Path:
    """Write a data set as one JSON-lines file per split, and return their folder.

    Files that are there already, with the same content, are not written again.

    Args:
        dataset: a `datasets.Dataset` or a list of rows (dicts), which is the split `train`; or a
            `datasets.DatasetDict` or a dict of lists of rows, by the name of the split.
        folder: the folder in which the folder of the data set is made.

    Raises:
        UserError: the object is no data set, a split has no rows, or a value cannot be written as JSON.
    """
    splits = _splits_of(dataset)
    digests = {}
    for name, rows in splits.items():
        hasher = hashlib.sha256()
        for line in _lines(name, rows):
            hasher.update(line)
        digests[name] = hasher.hexdigest()
    place = folder / hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
    for name, rows in splits.items():
        file = place / f"{name}.jsonl"
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digests[name]:
            continue
        place.mkdir(parents=True, exist_ok=True)
        with whole(file, private=True, durable=True) as scratch, scratch.open("wb") as out:
            out.writelines(_lines(name, rows))
    return place


def _splits_of(dataset: object) -> dict[str, _Rows | Sequence[Any]]:
    """Return the rows of each split of a data set.

    Raises:
        UserError: the object is no data set, or a split has no rows.
    """
    given: Mapping[Any, Any] = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    datasets = sys.modules.get("datasets")
    found: dict[str, _Rows | Sequence[Any]] = {}
    for name, split in given.items():
        stored = datasets is not None and isinstance(split, datasets.Dataset)
        if not (stored or isinstance(split, list | tuple)) or str(name) != component(str(name)):
            what = f"an object of type {type(dataset).__name__}"
            if isinstance(dataset, Mapping):
                what = f"a dict whose value {name!r} is an object of type {type(split).__name__}"
            raise UserError(f"{_RULE}, got {what}; {_remedy(split)}")
        if len(split) == 0:
            raise UserError(f"dataset must have rows, got none in the split {name}; add rows")
        found[str(name)] = _Rows(split.with_format(None)) if stored else split
    if not found:
        raise UserError("dataset must have the split train, got no split; add rows")
    return found


class _Rows:
    """The rows of a `datasets.Dataset` as JSON Lines would have them, see `rows_of_arrow`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        from rlhf.tasks.source import numbered

        return (row for _, row in numbered(self.dataset, "dataset"))


def _remedy(rows: Any) -> str:
    """Return what to write in place of an object that is no split."""
    if isinstance(rows, str | Path):
        return "for files set task=local task.path=<file or folder>"
    name = type(rows).__name__
    if name == "DataFrame":
        return "write dataset=frame.to_dict('records')"
    if name == "IterableDataset":
        return "write datasets.Dataset.from_list(list(dataset))"
    return "write [{'prompt': '...'}, ...]"


def _lines(split: str, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield the rows of a split as lines of JSON.

    Raises:
        UserError: a row is no dict, or a value cannot be written as JSON.
    """
    for number, row in enumerate(rows, 1):
        place = f"row {number} of {split}"
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise UserError(
                f"{_RULE} with texts as keys, got {place} with {shortened(repr(row), 60)}; write "
                "{'prompt': '...'}"
            )
        try:
            yield _as_json(dict(row)) + b"\n"
        except _ERRORS:
            for name, value in row.items():
                try:
                    _as_json(value)
                except _ERRORS as reason:
                    raise UserError(
                        "dataset must have texts, numbers, lists and dicts (its rows are stored as JSON), "
                        f"got {place} with {shortened(repr(value), 60)} in the column {name} ({reason}); "
                        "convert the values, or remove the column"
                    ) from None
            raise


def _as_json(value: object) -> bytes:
    """Return a value as JSON in UTF-8; values of numpy as those of Python.

    Raises:
        TypeError, ValueError, RecursionError: the value has no form in JSON.
    """

    def plain(value: object) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain).encode()
