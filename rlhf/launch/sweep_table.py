"""The table at the end of a sweep: job, result, status, swept values and run folder.

This module imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.formatting import figure, short_path

if TYPE_CHECKING:
    from rlhf.runs.folder import RunFolder


@dataclass(slots=True, kw_only=True)
class Row:
    """A job in the table of a sweep.

    Attributes:
        number: number of the job, from 1.
        label: the overrides that not all jobs share.
        overrides: the overrides of the job.
        folder: the run folder; None if the config of the job is invalid.
        metric: name of the metric that a sweeper optimises.
        status: status of the job if it did not run: "finished before", or "same run as job <number>".
        failed: whether the job failed.
    """

    number: int
    label: str
    overrides: tuple[str, ...] = ()
    folder: RunFolder | None = None
    metric: str = ""
    status: str | None = None
    failed: bool = False

    @property
    def state(self) -> str:
        """The status of the job: failed, finished, unfinished, or why a hook stopped it, such as pruned."""
        if self.failed:
            return "failed"
        if self.status is not None:
            return self.status
        state = None if self.folder is None else self.folder.read_state()
        if state is None or not state.get("finished"):
            return "unfinished" if state is None else state.get("stopped", "unfinished")
        return "finished"

    @property
    def result(self) -> float | None:
        """The final value of the metric; None if the run is not finished."""
        finished = self.folder.finished() if self.folder is not None and not self.failed else None
        return None if finished is None else finished["result"].get(self.metric)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table: two lines per job, the second with the run folder."""
    metrics = {row.metric for row in rows if row.metric}
    heading = metrics.pop() if len(metrics) == 1 else "result"
    results = ["" if row.result is None else figure(row.result) for row in rows]
    if heading == "result":
        results = [f"{row.metric} {text}" if text else "" for row, text in zip(rows, results, strict=True)]
    states = [row.state for row in rows]
    width, state_width = max(map(len, [heading, *results])), max(map(len, ["status", *states]))
    yield f"job  {heading:>{width}}  {'status':{state_width}}  values".rstrip()
    for row, result, state in zip(rows, results, states, strict=True):
        yield f"{row.number:3}  {result:>{width}}  {state:{state_width}}  {row.label}".rstrip()
        if row.folder is not None and not (row.status or "").startswith("same"):
            yield f"     {row.folder.path}"


def report_command(rows: Sequence[Row], folder: Path) -> str:
    """Return the command that compares the runs of a sweep.

    It names `folder`, which contains the run folders, unless there are also other runs in it.
    """
    own = list(dict.fromkeys(row.folder.path for row in rows if row.folder is not None))
    names = {path.resolve() for path in own}
    others = [file for file in folder.glob("*/config.yaml") if file.parent.resolve() not in names]
    return shlex.join(["python", "-m", "rlhf.report", *map(short_path, own if others else [folder])])
