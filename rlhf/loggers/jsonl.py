"""The logger of metrics.jsonl, completions.jsonl and trainer_state.json, used by every run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.core.console import say
from rlhf.core.files import append, as_line, split_lines, write_atomically
from rlhf.loggers.logger import Logger

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


class JsonlLogger(Logger):
    """A logger that appends rows to the files of the run folder.

    When a run resumes, the logger removes the rows of updates after the checkpoint, because these updates are
    repeated. Without a checkpoint, the logger removes all rows.

    Args:
        folder: the run folder.
        state: the counters of the run at its start or at its checkpoint.
    """

    def __init__(self, folder: RunFolder, state: TrainState) -> None:
        self.folder = folder
        self.metrics = folder.metrics
        self.completions = folder.completions
        for file in (self.metrics, self.completions):
            rows = intact_rows(file) if state.update else []
            keep = [row for row in rows if row.get("update", 0) <= state.update]
            write_atomically(file, "".join(map(as_line, keep)))

    def log(self, row: Row, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and write the progress of the run to trainer_state.json."""
        append(self.metrics, [row])
        self.folder.write_state({**state.state_dict(), "finished": False})

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and the completions to completions.jsonl."""
        append(self.metrics, [row])
        append(self.completions, [{"update": state.update, **sample} for sample in evaluation.samples])


def intact_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file; move lines that are no JSON objects to `<file>.damaged`."""
    rows, damaged = split_lines(file)
    if damaged:
        aside = file.with_name(f"{file.name}.damaged")
        with aside.open("ab") as out:
            out.writelines(line + b"\n" for line in damaged.values())
        numbers = ", ".join(map(str, damaged))
        text = f"warning: {file} had lines that are no JSON objects ({numbers}), moved to {aside.name}"
        say(text, style="yellow")
    return rows
