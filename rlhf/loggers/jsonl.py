"""metrics.jsonl, completions.jsonl and trainer_state.json: always written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.folder import RunFolder, named, write_atomically
from rlhf.loggers.logger import Logger, Row
from rlhf.state import TrainState

if TYPE_CHECKING:
    from rlhf.evaluators import Evaluation


class JsonlLogger(Logger):
    """Appends rows to the run folder's files, after dropping those that lie beyond where the run stands.

    A run that was killed may have written rows of updates that its checkpoint does not know; they are made
    again.
    """

    def __init__(self, folder: RunFolder, state: TrainState) -> None:
        self.folder = folder
        self.metrics = folder.metrics
        self.completions = folder.completions
        for file in (self.metrics, self.completions):
            keep = [line for line in read_lines(file) if state.update and line["update"] <= state.update]
            write_atomically(file, "".join(map(as_line, keep)))

    def log(self, row: Row, state: TrainState) -> None:
        """Append the row, and note where the run stands."""
        append(self.metrics, [row])
        self.folder.write_state({**state.state_dict(), "finished": False})

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Append the row, and the completions."""
        append(self.metrics, [row])
        append(self.completions, [{"update": state.update, **sample} for sample in evaluation.samples])


def append(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line at the end of `file`."""
    with named(file), file.open("a", encoding="utf-8") as out:
        out.writelines(map(as_line, rows))


def as_line(row: dict[str, Any]) -> str:
    """A row as one line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off by a crash is left out, an absent file
    is empty.
    """
    if not file.exists():
        return []
    *whole, _ = file.read_text(encoding="utf-8").split("\n")  # not splitlines: texts hold other line ends
    return [json.loads(line) for line in whole]
