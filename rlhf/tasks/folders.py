"""Local data folders, looked at without torch or datasets, so that they are checked before anything is
loaded.

A folder is either what `datasets.save_to_disk` writes (a DatasetDict, or a Dataset, which counts as
the split `train`) or holds one file a split: `train.jsonl`, `validation.parquet`, ... .
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}  # suffix -> builder of datasets


def is_saved(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def split_files(folder: Path) -> dict[str, Path]:
    """The split files of a folder that `save_to_disk` did not write: split -> file."""
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in FORMATS}


def split_columns(folder: Path) -> dict[str, list[str]]:
    """The columns of each split of a folder: split -> names.

    Raises ValueError, OSError or a format's own error where a file is not what its name says.
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
        if first.lstrip().startswith("["):  # one array of objects instead of one object a line
            lines.seek(0)
            record: object = next(iter(json.load(lines)), {})
        else:
            record = json.loads(first or "{}")
    if not isinstance(record, dict):
        raise ValueError("a row is not an object with named columns")
    return list(record)


def folder_problems(
    key: str, path: str, columns: Iterable[str], splits: Iterable[str], reason: str
) -> Iterator[str]:
    """Yield what keeps the folder `path` of the config key `key` from serving `columns` in `splits`."""
    folder = Path(path).expanduser()
    wanted = list(columns)
    if not folder.is_dir():
        state = "a file" if folder.exists() else "nothing there"
        yield (
            f"{key} must be a folder with one .jsonl, .json, .parquet or .csv file a split, or one that "
            f"datasets.save_to_disk wrote ({reason}), got {path} ({state}); set {key}=<folder>"
        )
        return
    try:
        found = split_columns(folder)
    except Exception as error:  # each format has its own; the user is told which folder it is in
        yield (
            f"{key} must hold readable data ({reason}), got {path}: {type(error).__name__}: {error}; "
            "repair the folder"
        )
        return
    for split in splits:
        if split not in found:
            present = ", ".join(found) or "no data file"
            yield (
                f"{key} must hold the split {split} ({reason}), got {path} with {present}; "
                f"add {split}.jsonl with the columns {', '.join(wanted)}"
            )
            continue
        missing = [column for column in wanted if column not in found[split]]
        if missing:
            present = ", ".join(found[split]) or "none"
            yield (
                f"{key} must have the columns {', '.join(wanted)} in its split {split} ({reason}), "
                f"got {path} with {present}; rename or add {', '.join(missing)}"
            )
