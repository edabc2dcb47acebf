"""Checks of the splits and columns of local data folders. This module imports no torch and loads no data set.

A data folder has one of two forms. `datasets.save_to_disk` wrote the folder, from a DatasetDict or from a
Dataset, which counts as the split `train`. Or the folder has one file per split: `train.jsonl`,
`validation.parquet`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

# Suffix of a split file -> builder of the `datasets` library.
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def is_saved(folder: Path) -> bool:
    """Return True if `datasets.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def split_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that has one file per split: split -> file."""
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in FORMATS}


def split_columns(folder: Path) -> dict[str, list[str]]:
    """Return the column names of each split of a folder: split -> names.

    Raises:
        Exception: a file cannot be read; the class of the exception depends on the file format.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return {split: _saved_columns(folder / split) for split in splits}
    if is_saved(folder):
        return {"train": _saved_columns(folder)}
    return {split: _file_columns(file) for split, file in split_files(folder).items()}


def _saved_columns(folder: Path) -> list[str]:
    return list(json.loads((folder / "dataset_info.json").read_text())["features"])


def _file_columns(file: Path) -> list[str]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(file).names)
    with file.open(encoding="utf-8") as lines:
        if file.suffix == ".csv":
            return next(csv.reader(lines), [])
        first = next((line for line in lines if line.strip()), "")
        if first.lstrip().startswith("["):  # one array of objects instead of one object per line
            lines.seek(0)
            record: object = next(iter(json.load(lines)), {})
        else:
            record = json.loads(first or "{}")
    if not isinstance(record, dict):
        raise ValueError("a row is not a JSON object with named columns")
    return list(record)


def folder_problems(
    key: str, path: str, columns: Iterable[str], splits: Iterable[str], reason: str
) -> Iterator[str]:
    """Yield an error message for each problem of a data folder.

    Args:
        key: config key that names the folder, for error messages.
        path: the folder.
        columns: required columns of every split.
        splits: required splits.
        reason: why the run needs the folder, for error messages.
    """
    folder = Path(path).expanduser()
    required = list(columns)
    if not folder.is_dir():
        state = "a file" if folder.exists() else "no such folder"
        yield (
            f"{key} must be a folder with one .jsonl, .json, .parquet or .csv file per split, or a folder "
            f"written by datasets.save_to_disk ({reason}), got {path} ({state}); set {key}=<folder>"
        )
        return
    try:
        available = split_columns(folder)
    except Exception as error:  # each format raises its own errors; the message names the folder
        yield (
            f"{key} must contain readable data ({reason}), got {path}: {type(error).__name__}: {error}; "
            "repair the files of the folder"
        )
        return
    for split in splits:
        if split not in available:
            present = ", ".join(available) or "no data file"
            yield (
                f"{key} must contain the split {split} ({reason}), got {path} with {present}; "
                f"add {split}.jsonl with the columns {', '.join(required)}"
            )
            continue
        missing = [column for column in required if column not in available[split]]
        if missing:
            present = ", ".join(available[split]) or "none"
            yield (
                f"{key} must have the columns {', '.join(required)} in its split {split} ({reason}), "
                f"got {path} with {present}; rename or add {', '.join(missing)}"
            )
