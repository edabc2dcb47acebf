"""The file of results: one JSON row per run, sorted, with the values that tables and figures need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.atlas.design import Cell, Design, Run
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically

FALL = 0.1  # a run whose final value is this much below its best value has collapsed
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run.

    Attributes:
        run: `Design.key` of the run.
        task, method, lag, minibatches, samples, width, seed, rate: the settings of the run.
        part: "tuning", "figures" or "collapse".
        status: "finished"; "diverged" if a loss was not finite; "failed" after another error.
        error: the first line of the error; None if finished.
        updates: optimizer steps that were made.
        evaluations: [update, KL, value of the metric of the task, gold score] of each evaluation.
        result: final value of the metric of the task; 0 unless finished.
        best: best value of an evaluation.
        collapsed: whether the run diverged or failed, or ended at least `FALL` below its best value.
        ess: effective sample size of responses as a fraction, mean over the last quarter of the updates.
        cpu_s: CPU seconds of the run, without the models that all runs share.
        versions: commit of the code (see `worker.commit`), and version of torch.
    """

    run: str
    task: str
    method: str
    lag: int
    minibatches: int
    samples: int
    width: int
    seed: int
    rate: float
    part: str
    status: str
    error: str | None
    updates: int
    evaluations: Sequence[tuple[float, float, float, float]]
    result: float
    best: float
    collapsed: bool
    ess: float | None
    cpu_s: float
    versions: str

    @property
    def cell(self) -> Cell:
        """The cell of the run."""
        return Cell(self.task, self.method, self.lag, self.minibatches, self.samples, self.width)

    @property
    def gold(self) -> float | None:
        """The final gold score; None unless finished."""
        return self.evaluations[-1][3] if self.status == FINISHED else None

    @property
    def kl(self) -> float | None:
        """The final KL to the reference in nats per response; None unless finished."""
        return self.evaluations[-1][1] if self.status == FINISHED else None

    def measured(self) -> dict[str, object]:
        """Return the fields that must be equal if the run is repeated."""
        return {name: value for name, value in asdict(self).items() if name not in ("cpu_s", "versions")}


NAMES = tuple(field.name for field in fields(Row))


def row(
    design: Design,
    run: Run,
    status: str,
    evaluations: Sequence[tuple[float, float, float, float]],
    *,
    error: str | None = None,
    updates: int = 0,
    ess: float | None = None,
    cpu_s: float = 0.0,
    versions: str = "",
) -> Row:
    """Return the row of a run. Values are rounded to six decimals, as in the file."""
    assert run.rate is not None
    evaluations = [tuple(round(value, 6) for value in each) for each in evaluations]  # type: ignore[misc]
    values = [each[2] for each in evaluations]
    result = values[-1] if status == FINISHED else 0.0
    best = max(values, default=0.0)
    return Row(
        run=design.key(run),
        **run.cell._asdict(),
        seed=run.seed,
        rate=run.rate,
        part=part_of(design, run),
        status=status,
        error=error,
        updates=updates,
        evaluations=evaluations,
        result=result,
        best=best,
        collapsed=status != FINISHED or result <= best - FALL + 1e-9,
        ess=None if ess is None else round(ess, 6),
        cpu_s=round(cpu_s, 2),
        versions=versions,
    )


def part_of(design: Design, run: Run) -> str:
    """Return the part of the study that a run belongs to, which its seed determines."""
    if run.seed in design.tuning_seeds:
        return "tuning"
    return "collapse" if run.seed in design.collapse_seeds else "figures"


def read(file: Path) -> dict[str, Row]:
    """Return the rows of a file by `Row.run`; no rows if the file does not exist.

    Raises:
        UserError: a line is not a row.
    """
    rows: dict[str, Row] = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            found["evaluations"] = [tuple(each) for each in found["evaluations"]]
            rows[found["run"]] = Row(**found)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"line {number} of {file} must be a row of the atlas (a JSON object with "
                f"{', '.join(NAMES)}), got {line[:60]!r} ({error}); delete the line, then run: make atlas"
            ) from error
    return rows


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write rows, sorted by their settings, in place of the file."""
    ordered = sorted(rows, key=lambda row: (row.part != "figures", row.cell, row.rate, row.seed))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(asdict(row)) + "\n" for row in ordered))
