"""The files of `task=local`: splits, columns, and the checks before a run. No torch, no `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.algo import Data
from rlhf.core.errors import UserError
from rlhf.core.pasting import literal, python_command, setting
from rlhf.tasks.columns import Layout, converted
from rlhf.tasks.folders import Splits, scan, similar
from rlhf.tasks.reading import FORMATS, suffix_of
from rlhf.tasks.recognition import recognise

if TYPE_CHECKING:
    from rlhf.config.task import ColumnsConfig

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
