"""rows.jsonl: the results of a study, one row a run. Tables, figures and claims are made of it alone."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from rlhf.core.files import as_line, read_lines, write_atomically

TABLE, TUNE = "table", "tune"  # parts of a study
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run.

    Names of tasks, methods, axes and values are those of the study file when the file of rows was written.

    Attributes:
        run: identity: the digest of the settings that results depend on (`rlhf.config.identity.digest`).
        inputs: digest of each input outside of the settings (data, model folders, source of plug-ins).
        results: results version of the project; 0: unknown.
        task, method: names of the cell.
        levels: value of each axis.
        seed: the value of the keys that a seed sets.
        part: `TABLE` or `TUNE`.
        tuned: value of each tuned key.
        status: `FINISHED`; `DIVERGED` if a loss was not finite; `FAILED` after another error.
        error: the first line of the error; None if finished.
        metric: the objective metric of the run.
        metrics: all metrics of the last evaluation.
        evaluations: "update" and the chosen metrics, each with one value per evaluation.
        means: training metrics, mean over the last quarter of the updates.
        prompts: number of held-out prompts of the last evaluation; 0: unknown.
        bits: one bit per held-out prompt of the last evaluation (see `packed`); None: scores are not binary.
        cpu_s, gpu_s: CPU and GPU seconds of the run, without the models that runs share.
        memory_gb: peak memory in GB (10^9 bytes); None: not measured.
        machine: machine class: processor, instruction set, GPU, threads, libraries; "": unknown.
        models: digest of each stage model (SFT, pairs, reward model).
        versions: commit of the code, with "+ changes" if files were changed; version of torch.
    """

    run: str
    inputs: Mapping[str, str]
    results: int
    task: str
    method: str
    levels: Mapping[str, str]
    seed: int
    part: str
    tuned: Mapping[str, str]
    status: str
    error: str | None
    metric: str
    metrics: Mapping[str, float]
    evaluations: Mapping[str, Sequence[float | None]]
    means: Mapping[str, float]
    prompts: int
    bits: str | None
    cpu_s: float
    gpu_s: float
    memory_gb: float | None
    machine: str
    models: Mapping[str, str]
    versions: str


_NAMES = tuple(each.name for each in fields(Row))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file; no rows if the file does not exist. Keys of later versions are ignored.

    Raises:
        UserError: the file cannot be read, or a line is not a row; the error names the line.
    """
    return [Row(**{name: row[name] for name in _NAMES}) for row in read_lines(file, _NAMES)]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows in place of a file, whole and sorted by part, cell, tuned values and seed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(as_line(asdict(row)) for row in sorted(rows, key=_order)))


def packed(outcomes: Sequence[bool]) -> str:
    """Return one bit per prompt as base64 (256 prompts: 44 characters)."""
    return base64.b64encode(np.packbits(np.asarray(outcomes, bool)).tobytes()).decode()


def unpacked(row: Row) -> np.ndarray | None:
    """Return the outcomes [prompts] of a row as booleans; None if it has no bits."""
    if row.bits is None:
        return None
    return np.unpackbits(np.frombuffer(base64.b64decode(row.bits), np.uint8), count=row.prompts).astype(bool)


def _order(row: Row) -> tuple:
    levels = [(axis, _number(value)) for axis, value in row.levels.items()]
    return row.part, row.task, row.method, levels, sorted(row.tuned.items()), row.seed, row.run


def _number(text: str) -> tuple[float, str]:
    """Return a key that sorts numbers by their value, and texts after numbers."""
    return (float(text), "") if re.fullmatch(r"-?\d+\.?\d*(e-?\d+)?", text) else (float("inf"), text)
