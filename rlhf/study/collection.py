"""Collection of rows: each run writes `row.json` in its folder, and one process writes `rows.jsonl`.

This module imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rlhf.runs.lock import LOCK, Lock
from rlhf.study import history
from rlhf.study.planning import Configs, Plan
from rlhf.study.rows import FAILED, Row, read_rows, write_rows
from rlhf.study.spec import Spec
from rlhf.study.tuning import write_choices

ROW = "row.json"  # of a run folder
FAILURES = "failures.jsonl"  # of a run folder: attempts without a row


class Collection:
    """The rows of a study: those of run folders, and those of its file."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.read: dict[Path, tuple[int, list[Row]]] = {}  # rows of each file with its time of change

    def rows(self) -> list[Row]:
        """Return all rows, one for each run; those of run folders count first."""
        found: dict[str, Row] = {}
        for file in (self.spec.rows, *self.spec.folder.glob(f"runs/*/{ROW}")):
            try:
                changed = file.stat().st_mtime_ns
            except FileNotFoundError:  # another process has begun the run again
                continue
            if self.read.get(file, (0,))[0] != changed:
                self.read[file] = changed, read_rows(file)
            found |= {row.run: row for row in self.read[file][1]}
        return list(found.values())

    def collect(self, configs: Configs) -> bool:
        """Write `rows.jsonl` and `rates.json`, unless another process does; return whether they were written.

        Rows get the present names of their cells. Stale rows go to the history.
        """
        lock = Lock(self.spec.folder / LOCK, self.spec.rows)
        if not lock.acquire():
            return False
        try:
            plan = Plan(self.spec, self.rows(), configs)
            dropped = {each.stale.run: each.reason for each in plan.runs if each.stale}
            dropped |= {row.run: "other settings" for row in plan.unused}
            kept = {run: row for run, row in plan.rows.items() if run not in dropped}
            kept |= {each.row.run: replace(each.row, **each.run.names()) for each in plan.runs if each.row}
            for run in dropped.keys() & {row.run for row in read_rows(self.spec.rows)}:
                history.record(self.spec, "stale", reason=dropped[run], row=asdict(plan.rows[run]))
            write_rows(self.spec.rows, kept.values())
            if plan.tuning.choices:
                write_choices(self.spec.folder / "rates.json", plan.tuning.choices)
        finally:
            lock.release()
        return True

    def forget_failures(self) -> None:
        """Remove the rows of runs that failed, so that these runs are carried out again."""
        for file in self.spec.folder.glob(f"runs/*/{ROW}"):
            if any(row.status == FAILED for row in read_rows(file)):
                file.unlink()
                file.with_name(FAILURES).unlink(missing_ok=True)
        rows = read_rows(self.spec.rows)
        if any(row.status == FAILED for row in rows):
            write_rows(self.spec.rows, [row for row in rows if row.status != FAILED])
