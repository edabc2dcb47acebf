"""The files and folders of `task=local`: splits, columns, dialogues, checks before a run. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.algorithms import Data
from rlhf.config.tasks import TaskConfig
from rlhf.core.errors import UserError, literal, python_command, setting
from rlhf.tasks.columns import Layout, conversion, converted, recognise
from rlhf.tasks.reading import FORMATS, SHARD, Row, rows, stem, suffix_of

if TYPE_CHECKING:
    from rlhf.config.tasks import ColumnsConfig


# Data folders: their splits and files, and the checks before a run. This module imports no torch.
#
# A data folder has one of two forms. `datasets.save_to_disk` wrote the folder, from a DatasetDict or from a
# Dataset, which counts as the split `train`. Or the folder has one file per split: `train.jsonl`,
# `validation.parquet`, or parts of a split as on the hub (`train-00000-of-00002.parquet`).


_ALIASES = {"train": ("training",), "validation": ("val", "valid", "dev", "eval"), "test": ("testing",)}
SCANNED_BYTES = 50e6  # files of a split up to this size are read completely before a run starts


class Splits:
    """The splits of local data. One file in place of a folder is the split `train`.

    Args:
        path: the folder or file, as the user names it.
        key: config key that names the data, for error messages.

    Attributes:
        path: the folder or file.
        saved: `datasets.save_to_disk` wrote the folder.
        files: split -> its file, or its parts in their order; empty for a saved data set.

    Raises:
        UserError: a split has two files, or lacks a part, or a saved data set is damaged.
    """

    def __init__(self, path: str, key: str) -> None:
        self.named, self.key = path, key
        self.path = Path(path).expanduser()
        self.saved = any((self.path / f"dataset_{each}.json").is_file() for each in ("dict", "info"))
        self.files = {} if self.saved else self._files()
        self._saved_columns = self._columns_of_saved() if self.saved else {}

    def _files(self) -> dict[str, list[Path]]:
        if self.path.is_file():
            return {"train": [self.path]}
        found: dict[str, list[Path]] = {}
        totals: dict[str, int] = {}
        for file in sorted(self.path.iterdir()):
            if suffix_of(file) is None or not file.is_file():
                continue
            part = SHARD.fullmatch(stem(file))
            split = part[1] if part else stem(file)
            if split in found and not (part and split in totals):
                raise UserError(
                    f"{self.key} must contain one file per split, got {self.path} with "
                    f"{found[split][0].name} and {file.name}; remove or rename one of them"
                )
            found.setdefault(split, []).append(file)
            if part:
                totals[split] = int(part[3])
        for split, total in totals.items():
            if len(found[split]) != total:
                raise UserError(
                    f"{self.key} must contain all parts of a split, got {self.path} with "
                    f"{len(found[split])} of {total} parts of {split}; copy the missing files"
                )
        return found

    def _columns_of_saved(self) -> dict[str, list[str]]:
        try:
            folders = {"train": self.path}
            if (listed := self.path / "dataset_dict.json").is_file():
                folders = {split: self.path / split for split in json.loads(listed.read_text())["splits"]}
            return {
                split: list(json.loads((folder / "dataset_info.json").read_text())["features"])
                for split, folder in folders.items()
            }
        except (OSError, ValueError, KeyError) as error:
            raise self.damaged(error) from None

    def damaged(self, error: Exception) -> UserError:
        """Return the error for a saved data set that cannot be read because of `error`."""
        return UserError(
            f"{self.key} must contain a complete data set of datasets.save_to_disk, got {self.path} "
            f"({type(error).__name__}: {error}); save the data set again"
        )

    @property
    def names(self) -> list[str]:
        """The names under which splits are stored."""
        return list(self._saved_columns or self.files)

    def stored(self, split: str) -> str | None:
        """Return the name under which a split is stored: its own, or another usual one; None: not stored.

        Raises:
            UserError: its own name is missing, and there are two other usual names.
        """
        usual = [name for name in self.names if name.lower() in (split, *_ALIASES.get(split, ()))]
        if split in self.names:
            return split
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
        return self._saved_columns[name] if self.saved else list(next(self.rows(name))[1])

    def rows(self, name: str, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows of all files of a split, each with its place; see `rlhf.tasks.reading.rows`."""
        return _read(self.files[name], self.key, columns)

    def present(self, names: Iterable[str]) -> str:
        """Return what is stored, `names`, and what is not read, for a message about a missing split."""
        found = ", ".join(names) or "no data file"
        return found if self.saved else found + _ignored(self.path)

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
        required, key = tuple(columns), self.key
        available = {name: self.columns(name) for name in self.names}
        for split, name in {split: self.stored(split) for split in splits}.items():
            if name is None:
                remedy = f"add {split}.jsonl with the columns {', '.join(required)}"
                if key == "task.path" and split != "train" and available:
                    remedy += ", or set task=local, which splits off rows"
                yield (
                    f"{key} must contain the split {split} ({reason}), got {self.named} with "
                    f"{self.present(available)}; {remedy}"
                )
            elif missing := lacking(required, available[name]):
                place = self.named if self.saved else self.files[name][0]
                other = ", or set task=local, which recognizes other names" if key == "task.path" else ""
                yield (
                    f"{key} must have the columns {', '.join(required)} in its split {split} ({reason}), got "
                    f"{place} with {', '.join(available[name]) or 'none'}; rename or add "
                    f"{', '.join(missing)}{other}"
                )
            elif whole and not self.saved:
                files = tuple(self.files[name])
                if problem := _scan(files, tuple(file.stat().st_mtime for file in files), key, required):
                    yield problem


def lacking(required: Collection[str], present: Collection[str]) -> list[str]:
    """Return the required columns that are not present; `chosen` may contain the prompt of a pair."""
    missing = [column for column in required if column not in present]
    return [] if missing == ["prompt"] and "chosen" in required else missing


def _read(files: Iterable[Path], key: str, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
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
        for _ in converted(_read(files, key, columns), convert, key):
            pass
    except UserError as error:
        return error.problems[0]
    return None


@lru_cache(maxsize=64)  # the jobs of a sweep read the same files
def _scan(
    files: tuple[Path, ...], stamps: tuple[float, ...], key: str, columns: tuple[str, ...]
) -> str | None:
    return scan(files, key, columns, conversion(columns))


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
    elif near := similar(folder):
        remedy = f"did you mean {setting(key, near)}?"
    raise UserError(
        f"{key} must be a folder with one .jsonl, .json, .parquet or .csv file per split, or a folder "
        f"written by datasets.save_to_disk ({reason}), got {path} ({state}); {remedy}"
    )


def similar(path: Path) -> Path | None:
    """Return the existing file or folder beside a missing path with the closest name, or None."""
    if not path.parent.is_dir():
        return None
    close = get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return path.parent / close[0] if close else None


def _ignored(folder: Path) -> str:
    found = [each for each in sorted(folder.iterdir()) if each.suffix != ".md" and each.name[0] != "."]
    names = [each.name for each in found if each.is_file() and suffix_of(each) is None]
    others = {"a folder": Path.is_dir, "a broken link": lambda each: not each.exists()}
    for what, holds in others.items():
        names += [f"{each.name}, which is {what}" for each in found if holds(each) and suffix_of(each)]
    return f" (not read: {', '.join(names[:3])}; the formats are {FORMATS})" if names else ""


def folder_problems(
    key: str, path: str, columns: Iterable[str], splits: Iterable[str], reason: str
) -> Iterator[str]:
    """Yield an error message for each problem of a data folder; see `data_folder`, `Splits.problems_with`."""
    try:
        yield from data_folder(key, path, reason).problems_with(columns, splits, reason)
    except UserError as error:
        yield from error.problems


# The files of `task=local`: splits, columns, and the checks before a run. No torch, no `datasets`.


KEY = "task.path"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class LocalFiles(Splits):
    """The data that `task.path` names: a file, a folder with a file per split, or a saved data set.

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
        if not (place.is_file() or place.is_dir()):
            raise UserError(_missing(path, place))
        if place.is_file() and suffix_of(place) is None:
            raise UserError(
                f"{KEY} must name a file with a suffix that can be read ({FORMATS}), got {path}; "
                "save the data in one of these formats"
            )
        super().__init__(path, KEY)
        if self.stored("train") is None:
            raise UserError(self._no_rows())

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

    @property
    def conversational(self) -> bool | None:
        """Whether the first training row has a dialogue as its prompt; None: unknown, in a saved data set.

        Raises:
            UserError: the first row cannot be used.
        """
        if self.saved:
            return None
        layout, name = self.layout("train", Data.prompts), self.stored("train") or "train"
        _, first = next(converted(self.rows(name, layout.names), layout.example, KEY))
        return "messages" in first

    @property
    def first_prompt(self) -> str | None:
        """The first prompt if it is a text that the response does not repeat; "" in a saved data set.

        Raises:
            UserError: the first row cannot be used.
        """
        layout, name = self.layout("train", Data.prompts), self.stored("train") or "train"
        if layout.prompt is None or self.saved:
            return layout.prompt and ""
        _, first = next(converted(self.rows(name, layout.names), layout.example, KEY))
        prompt: str | None = first.get("query")
        return None if prompt and str(first["reference_response"]).startswith(prompt) else prompt

    def problems(self, data: Data) -> Iterator[str]:
        """Yield an error message for each stored split whose columns or rows a run cannot use.

        Args:
            data: what a training example of the run contains.
        """
        for split in ("train", "validation"):
            name = self.stored(split)
            if name is None:
                continue
            try:
                layout = self.layout(split, data)
            except UserError as error:
                yield from error.problems
                continue
            if self.saved:
                continue
            convert = {
                Data.prompts: layout.example,
                Data.references: layout.demonstration,
                Data.preferences: layout.pair,
            }[data]
            if problem := scan(self.files[name], KEY, layout.names, convert):
                yield problem
            elif split == "train" and self.stored("validation") is None:
                rows = converted(self.rows(name, layout.names), convert, KEY)
                names = ("query", "messages", "prompt")
                prompts = (next(row[name] for name in names if name in row) for _, row in rows)
                first = next(prompts)
                if all(prompt == first for prompt in prompts):
                    yield self.one_prompt()

    def one_prompt(self) -> str:
        """Return the error message for training rows with one prompt, of which none can be split off."""
        return (
            f"{KEY} must contain at least two different prompts (some rows are split off for validation), "
            f"got {self.path} with one prompt; add rows, or a file validation.jsonl beside train.jsonl"
        )

    def _no_rows(self) -> str:
        names = [file.name for files in self.files.values() for file in files]
        remedy = f"set {setting(KEY, self.path / names[0])}" if len(names) == 1 else "add a file train.jsonl"
        present = self.present(names or self.names)
        return f"{KEY} must contain the split train, got {self.path} with {present}; {remedy}"


def _missing(named: str, path: Path) -> str:
    if near := similar(path):
        remedy = f"did you mean {setting(KEY, near)}?"
    elif HUB_NAME.fullmatch(named) and not path.parent.is_dir():
        saved = f"data/{path.name}"
        code = f"load_dataset({literal(named)}).save_to_disk({literal(saved)})"
        command = python_command(f"from datasets import load_dataset; {code}")
        remedy = f"a data set of the hub must be saved first: {command}, then set {setting(KEY, saved)}"
    else:
        remedy = f"set {KEY}=<file or folder>"
    return f"{KEY} must name a file or folder of data, got {named} (no such file or folder); {remedy}"


# Whether a task has dialogues: from its section and the first row of local data. No torch is imported.


def has_dialogues(task: TaskConfig) -> bool | None:
    """Return whether the prompts of a task are known to be dialogues before any data set is loaded.

    Args:
        task: config section of the task.

    Returns:
        None if only the rows of the data set show it, if local data cannot be read, or if parts differ.
    """
    if task.own_files is not None:
        try:
            return bool(LocalFiles(*task.own_files).conversational)
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
