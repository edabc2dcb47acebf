"""Data folders: their splits and files, and the checks before a run. This module imports no torch.

A data folder has one of two forms. `datasets.save_to_disk` wrote the folder, from a DatasetDict or from a
Dataset, which counts as the split `train`. Or the folder has one file per split: `train.jsonl`,
`validation.parquet`, or parts of a split as on the hub (`train-00000-of-00002.parquet`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path

from rlhf.config.task import PREFERENCE_COLUMNS
from rlhf.core.errors import UserError
from rlhf.core.pasting import setting
from rlhf.tasks.columns import conversion, converted
from rlhf.tasks.reading import FORMATS, SHARD, Row, rows, stem, suffix_of

_ALIASES = {"train": ("training",), "validation": ("val", "valid", "dev", "eval"), "test": ("testing",)}
SCANNED_BYTES = 50e6  # files of a split up to this size are read completely before a run starts


def is_saved(folder: Path) -> bool:
    """Return True if `datasets.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def split_files(folder: Path, key: str) -> dict[str, list[Path]]:
    """Return the data files of a folder: split -> its file, or the parts of the split in their order.

    Args:
        folder: the folder.
        key: config key that names the folder, for error messages.

    Raises:
        UserError: a split has two files, or lacks a part.
    """
    found: dict[str, list[Path]] = {}
    totals: dict[str, int] = {}
    for file in sorted(folder.iterdir()):
        if suffix_of(file) is None or not file.is_file():
            continue
        part = SHARD.fullmatch(stem(file))
        split = part[1] if part else stem(file)
        if split in found and not (part and split in totals):
            raise UserError(
                f"{key} must contain one file per split, got {folder} with {found[split][0].name} and "
                f"{file.name}; remove or rename one of them"
            )
        found.setdefault(split, []).append(file)
        if part:
            totals[split] = int(part[3])
    for split, total in totals.items():
        if len(found[split]) != total:
            raise UserError(
                f"{key} must contain all parts of a split, got {folder} with {len(found[split])} of {total} "
                f"parts of {split}; copy the missing files"
            )
    return found


def find_split(names: Iterable[str], split: str, key: str) -> str | None:
    """Return the name of a split among `names`: the name itself, or another usual name; None: not there.

    Raises:
        UserError: the name itself is missing, and there are two other usual names; `key` names the data.
    """
    names = list(names)
    usual = [name for name in names if name.lower() in (split, *_ALIASES.get(split, ()))]
    if split in names:
        return split
    if len(usual) > 1:
        raise UserError(
            f"{key} must contain one split for {split}, got {' and '.join(usual)}; rename one to {split}"
        )
    return usual[0] if usual else None


def split_columns(folder: Path, key: str = "task.path") -> dict[str, list[str]]:
    """Return the column names of each split of a folder: split -> names.

    Raises:
        UserError: a file cannot be read.
    """
    if not is_saved(folder):
        return {split: file_columns(files, key) for split, files in split_files(folder, key).items()}
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            return {split: _saved_columns(folder / split) for split in splits}
        return {"train": _saved_columns(folder)}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{key} must contain a complete data set of datasets.save_to_disk, got {folder} "
            f"({type(error).__name__}: {error}); save the data set again"
        ) from error


def _saved_columns(folder: Path) -> list[str]:
    return list(json.loads((folder / "dataset_info.json").read_text())["features"])


def file_columns(files: Sequence[Path], key: str) -> list[str]:
    """Return the column names of the first row of a split.

    Raises:
        UserError: the first row cannot be read.
    """
    _, row = next(rows(files[0], key))
    return list(row)


def read(files: Sequence[Path], key: str, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the rows of all files of a split, each with its place; see `rlhf.tasks.reading.rows`."""
    return chain.from_iterable(rows(file, key, columns) for file in files)


def scan(
    files: Sequence[Path], key: str, columns: Sequence[str], convert: Callable[[Row], Row]
) -> str | None:
    """Return the error message for the first row of a split that cannot be used, or None.

    Files that are too large for a check before the run are not read; their rows are checked when the run
    loads them.
    """
    size = sum(file.stat().st_size * (5 if file.name.lower().endswith(".gz") else 1) for file in files)
    if size > SCANNED_BYTES:
        return None
    try:
        for _ in converted(read(files, key, columns), convert, key):
            pass
    except UserError as error:
        return error.problems[0]
    return None


@lru_cache(maxsize=64)  # the jobs of a sweep read the same files
def _scan(
    files: tuple[Path, ...], stamps: tuple[float, ...], key: str, columns: tuple[str, ...]
) -> str | None:
    return scan(files, key, columns, conversion(columns))


def _place_problem(key: str, path: str, reason: str) -> str | None:
    """Return the error message for a path that is no folder, with similar names beside it; else None."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return None
    state, remedy = "no such folder", f"set {key}=<folder>"
    if folder.exists():
        state = "a file"
        if key == "task.path":
            remedy = f"set task=local {setting('task.path', path)}, or {key}=<folder>"
    elif near := similar(folder):
        remedy = f"did you mean {setting(key, near)}?"
    return (
        f"{key} must be a folder with one .jsonl, .json, .parquet or .csv file per split, or a folder "
        f"written by datasets.save_to_disk ({reason}), got {path} ({state}); {remedy}"
    )


def similar(path: Path) -> Path | None:
    """Return the existing file or folder beside a missing path with the closest name, or None."""
    if not path.parent.is_dir():
        return None
    close = get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return path.parent / close[0] if close else None


def ignored(folder: Path) -> str:
    """Return the names of files and folders that are not read, for a message about a missing split."""
    found = [each for each in sorted(folder.iterdir()) if each.suffix != ".md" and each.name[0] != "."]
    names = [each.name for each in found if each.is_file() and suffix_of(each) is None]
    others = {"a folder": Path.is_dir, "a broken link": lambda each: not each.exists()}
    for what, holds in others.items():
        names += [f"{each.name}, which is {what}" for each in found if holds(each) and suffix_of(each)]
    return f" (not read: {', '.join(names[:3])}; the formats are {FORMATS})" if names else ""


def folder_problems(
    key: str, path: str, columns: Iterable[str], splits: Iterable[str], reason: str, whole: bool = True
) -> Iterator[str]:
    """Yield an error message for each problem of a data folder.

    Args:
        key: config key that names the folder, for error messages.
        path: the folder.
        columns: required columns of every split.
        splits: required splits.
        reason: why the run needs the folder, for error messages.
        whole: check all rows of files that are not too large; False: only the columns of the first row.
    """
    folder, required = Path(path).expanduser(), tuple(columns)
    if problem := _place_problem(key, path, reason):
        yield problem
        return
    try:
        available = split_columns(folder, key)
        names = {split: find_split(available, split, key) for split in splits}
    except UserError as error:
        yield from error.problems
        return
    for split, name in names.items():
        if name is None:
            present = (", ".join(available) or "no data file") + ("" if is_saved(folder) else ignored(folder))
            remedy = f"add {split}.jsonl with the columns {', '.join(required)}"
            if key == "task.path" and split != "train" and available:
                remedy += ", or set task=local, which splits off rows"
            yield f"{key} must contain the split {split} ({reason}), got {path} with {present}; {remedy}"
            continue
        missing = [column for column in required if column not in available[name]]
        if required == PREFERENCE_COLUMNS and missing == ["prompt"]:
            missing = []  # messages in chosen and rejected may contain the prompt
        if missing:
            present = ", ".join(available[name]) or "none"
            place = path if is_saved(folder) else split_files(folder, key)[name][0]
            other = ", or set task=local, which recognizes other names" if key == "task.path" else ""
            yield (
                f"{key} must have the columns {', '.join(required)} in its split {split} ({reason}), "
                f"got {place} with {present}; rename or add {', '.join(missing)}{other}"
            )
        elif whole and not is_saved(folder):
            files = tuple(split_files(folder, key)[name])
            if problem := _scan(files, tuple(file.stat().st_mtime for file in files), key, required):
                yield problem
