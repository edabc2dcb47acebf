"""The logger of metrics.jsonl, completions.jsonl, groups.jsonl and trainer_state.json, used by every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.core.console import say
from rlhf.core.files import append, as_line, split_lines, sync, write_atomically
from rlhf.loggers.logger import Logger
from rlhf.runs import history
from rlhf.runs.history import History

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from rlhf.core.metrics import Evaluation, Row
    from rlhf.core.state import TrainState
    from rlhf.runs.folder import RunFolder


class JsonlLogger(Logger):
    """A logger that appends rows to the files of the run folder.

    When a run resumes, the logger restores missing and damaged rows until the checkpoint, and removes later
    rows, because these updates are repeated. Without a checkpoint, the logger removes all rows.

    Args:
        folder: the run folder.
        state: the counters of the run at its start or at its checkpoint. A file whose rows are lost is added
            to `lost_rows`.
        checkpoint: the checkpoint from which the run resumes; None: the run starts.
    """

    def __init__(self, folder: RunFolder, state: TrainState, checkpoint: Path | None) -> None:
        self.folder = folder
        self.state = state
        self.metrics = History(folder.metrics)
        self.completions = History(folder.completions)
        for rows in (self.metrics, self.completions):
            if checkpoint is None:
                rows.start()
            elif history.has_copies(checkpoint):
                warn(rows, rows.resume(checkpoint))
            elif damage := rows.resume_without_copy(state.update):
                state.lost_rows = [*state.lost_rows, rows.file.name]
                warn(rows, damage)
        if folder.groups.exists():
            kept = [] if checkpoint is None else split_lines(folder.groups, ["update"])[0]
            lines = "".join(as_line(row) for row in kept if row["update"] <= state.update)
            write_atomically(folder.groups, lines)

    def log(self, row: Row, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and write the progress of the run to trainer_state.json."""
        self.metrics.append([row])
        self.folder.write_state({**state.state_dict(), "finished": False})

    def groups(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows to groups.jsonl, which has no copy in checkpoints: it may have many rows."""
        append(self.folder.groups, rows)

    def evaluation(self, row: Row, evaluation: Evaluation, state: TrainState) -> None:
        """Append the row to metrics.jsonl, and the completions to completions.jsonl."""
        self.metrics.append([row])
        self.completions.append({"update": state.update, **sample} for sample in evaluation.samples)

    def save(self, checkpoint: Path) -> None:
        """Write a copy of all rows into a checkpoint, after the rows in the run folder are on disk."""
        self.restore()
        history.save((self.metrics, self.completions), checkpoint)

    def close(self) -> None:
        """Restore rows that were damaged since the last checkpoint, if the run is finished."""
        if self.state.done:
            self.restore()

    def restore(self) -> None:
        """Write damaged files again, and wait until all rows are on disk (fsync)."""
        for rows in (self.metrics, self.completions):
            if damage := rows.restore():
                warn(rows, f"{damage}; it was written again with {rows.count} rows")
        if self.folder.groups.exists():
            sync(self.folder.groups)
        sync(self.folder.path)


def warn(rows: History, damage: str | None) -> None:
    """Print a warning about damaged rows, and write it to train.log."""
    if damage is not None:
        say(f"warning: {rows.file} {damage}", style="yellow")
