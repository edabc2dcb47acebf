"""rows.jsonl: the results of a study, one row a run. Tables, figures and claims are made of it alone."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from rlhf.core.errors import UserError
from rlhf.core.files import as_line, read_lines, write_atomically
from rlhf.report.runs import finite

TABLE, TUNE = "table", "tune"  # parts of a study
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run, with the names that the study file had when the file of rows was written."""

    run: str  # identity: digest of the settings that results depend on (`rlhf.config.identity.digest`)
    inputs: Mapping[str, str]  # digests of what the settings name: data, model folders, source of plug-ins
    results: int  # results version of the project; 0: unknown
    task: str
    method: str
    levels: Mapping[str, str]  # value of each axis
    seed: int  # value of the keys that a seed sets
    part: str  # `TABLE` or `TUNE`
    tuned: Mapping[str, str]  # value of each tuned key
    status: str  # `FINISHED`; `DIVERGED`: a loss was not finite; `FAILED`: another error
    error: str | None  # the first line of the error
    metric: str  # the objective metric
    metrics: Mapping[str, float]  # all metrics of the last evaluation
    evaluations: Mapping[str, Sequence[float | None]]  # "update" and chosen metrics, a value per evaluation
    means: Mapping[str, float]  # training metrics, mean over the last quarter of the updates
    prompts: int  # held-out prompts of the last evaluation; 0: unknown
    bits: str | None  # one bit per held-out prompt (see `packed`); None: scores are not binary
    cpu_s: float  # CPU seconds, without the models that runs share
    gpu_s: float
    memory_gb: float | None  # peak memory in 10^9 bytes; None: not measured
    machine: str  # machine class: processor, instruction set, GPU, threads, libraries; "": unknown
    models: Mapping[str, str]  # digest of each stage model (SFT, pairs, reward model)
    versions: str  # commit, with "+ changes" if files were changed; version of torch


_NAMES = tuple(each.name for each in fields(Row))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_points(value: object) -> bool:
    return isinstance(value, list) and all(each is None or finite(each) for each in value)


def _each(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


_HOLDS: Mapping[str, Callable[[object], bool]] = {  # of a field as studies write it
    **dict.fromkeys(("run", "task", "method", "part", "metric", "machine", "versions"), _is_text),
    **dict.fromkeys(("inputs", "levels", "tuned", "models"), _each(_is_text)),
    **dict.fromkeys(("metrics", "means"), _each(finite)),
    "evaluations": _each(_is_points),
    **dict.fromkeys(("results", "seed", "prompts"), lambda value: isinstance(value, int)),
    **dict.fromkeys(("cpu_s", "gpu_s"), finite),
    "status": lambda value: value in (FINISHED, DIVERGED, FAILED),
}


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file; no rows if the file does not exist. Keys of later versions are ignored.

    Raises:
        UserError: the file cannot be read, or a line is not a row; the error names the line.
    """
    rows = read_lines(file, _NAMES)
    for row in rows:
        if wrong := [name for name, holds in _HOLDS.items() if not holds(row[name])]:
            rule = f"{file} must have {', '.join(wrong)} as studies write them"
            raise UserError(f"{rule}, got others in run {row['run']}; restore the file, or delete the line")
    return [Row(**{name: row[name] for name in _NAMES}) for row in rows]


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
