"""The files and folders of task data: splits, columns, rows, and the checks before a run. No torch."""

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
from rlhf.tasks.reading import FORMATS, SHARD, Row, arrow_rows, rows, stem, suffix_of

if TYPE_CHECKING:
    from rlhf.config.tasks import ColumnsConfig

_ALIASES = {"train": ("training",), "validation": ("val", "valid", "dev", "eval"), "test": ("testing",)}
SCANNED_BYTES = 50e6  # files of a split up to this size are read completely before a run starts


class Splits:
    """The splits of local data, in one of three forms. This module imports no torch and no `datasets`.

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
                    state, info = (
                        json.loads((folder / f"{each}.json").read_text())
                        for each in ("state", "dataset_info")
                    )
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
            if suffix_of(file) is None or not file.is_file():
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

    def rows(self, name: str, columns: Collection[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows of the split that is stored as `name`, each with its place for messages.

        Args:
            name: name of the split.
            columns: the columns that the caller reads, if known; others may be missing in the rows.

        Raises:
            UserError: a file cannot be read, or has no rows; see `rlhf.tasks.reading.rows`.
        """
        if not self.saved:
            yield from chain.from_iterable(rows(file, self.key, columns) for file in self.files[name])
            return
        import pyarrow

        number = 0
        try:
            found = chain.from_iterable(arrow_rows(file, columns) for file in self.files[name])
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
        unread = [each.name for each in others if each.is_file() and suffix_of(each) is None]
        readable = [each for each in others if suffix_of(each)]
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

    def scan(
        self, name: str, columns: Sequence[str], convert: Callable[[Row], Row]
    ) -> tuple[str | None, bool]:
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
    path: str, key: str, name: str, columns: tuple[str, ...], convert: Callable[[Row], Row], stamps: object
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
        if place.is_file() and suffix_of(place) is None:
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
