"""The table at the end of a sweep: job, result, status, swept values and run folder.

This module imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf.core.formatting import figure, short_path
from rlhf.launch.jobs import Job


def lines(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield the lines of the table: two lines per job, the second with the run folder."""
    metrics = {job.metric for job in jobs if job.metric}
    heading = metrics.pop() if len(metrics) == 1 else "result"
    results = ["" if job.result is None else figure(job.result) for job in jobs]
    if heading == "result":
        results = [f"{job.metric} {text}" if text else "" for job, text in zip(jobs, results, strict=True)]
    states = [job.state for job in jobs]
    width, state_width = max(map(len, [heading, *results])), max(map(len, ["status", *states]))
    yield f"job  {heading:>{width}}  {'status':{state_width}}  values".rstrip()
    for job, result, state in zip(jobs, results, states, strict=True):
        yield f"{job.number:3}  {result:>{width}}  {state:{state_width}}  {job.label}".rstrip()
        if job.folder is not None and not (job.status or "").startswith("same"):
            yield f"     {job.folder.path}"


def report_command(jobs: Sequence[Job], folder: Path) -> str:
    """Return the command that compares the runs of a sweep.

    It names `folder`, which contains the run folders, unless there are also other runs in it.
    """
    own = list(dict.fromkeys(job.folder.path for job in jobs if job.folder is not None))
    names = {path.resolve() for path in own}
    others = [file for file in folder.glob("*/config.yaml") if file.parent.resolve() not in names]
    return shlex.join(["python", "-m", "rlhf.report", *map(short_path, own if others else [folder])])
