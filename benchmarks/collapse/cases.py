"""The runs of the study: what a collapse is, and a file with the metrics that the rule reads."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.report.runs import Run, Status, find_runs

WIN_RATE, ACCURACY = "eval/win_rate", "eval/gold_score"
RIGHT_OR_WRONG = ("arithmetic", "gsm8k")  # tasks whose gold score is the accuracy
FALL = 0.1
EARLY = 10  # updates between warning and collapse
EVALUATIONS = 4
METRICS = (  # that the rule reads
    *("objective/kl", "objective/entropy", "objective/response_tokens"),
    *("mismatch/kl", "mismatch/ess", "policy/grad_norm"),
)


@dataclass(frozen=True)
class Case:
    """A run as the study sees it.

    Attributes:
        name: name of the run folder.
        kind: task and algorithm.
        rate: learning rate.
        rows: rows of training metrics, with `update` and those of `METRICS` that the run logs.
        collapse: update of the collapse; None: the run is stable.
    """

    name: str
    kind: str
    rate: float
    rows: list[dict[str, float]]
    collapse: float | None


def cases_of(folders: Sequence[str]) -> list[Case]:
    """Return the cases among the runs of `folders`."""
    return [case for run in find_runs(folders).runs if (case := case_of(run)) is not None]


def case_of(run: Run) -> Case | None:
    """Return a run as a case; None if the run does not count."""
    sampled = [row for row in run.trained if "objective/kl" in row]
    rows = [{name: row[name] for name in ("update", *METRICS) if name in row} for row in sampled]
    metric = ACCURACY if run.config["task.name"] in RIGHT_OR_WRONG else WIN_RATE
    if not rows or run.last(metric) is None or run.status is Status.unfinished:
        return None
    if (run.num_updates or 0) <= EARLY:  # no warning can be early enough
        return None
    values = [(row["update"], row[metric]) for row in run.evaluations if metric in row]
    failed = run.status is Status.failed
    if len(values) < EVALUATIONS and not failed:
        return None
    collapse = collapsed_at(values)
    if collapse is None and failed:
        collapse = rows[-1]["update"]
    kind = f"{run.config['task.name']} {run.config['algo.name']}"
    return Case(run.folder.name, kind, run.config["optim.lr"], rows, collapse)


def collapsed_at(values: Sequence[tuple[float, float]], fall: float = FALL) -> float | None:
    """Return the update of the collapse; None: the last value is less than `fall` below the best.

    Args:
        values: update and metric of each evaluation, in order.
        fall: the smallest fall below the best earlier value.
    """
    best, found = -math.inf, None
    for update, value in values:
        if value > best - fall + 1e-9:
            found = None
        elif found is None:
            found = update
        best = max(best, value)
    return found


def distinct(cases: Sequence[Case]) -> list[Case]:
    """Return the cases without repetitions: methods that are equal with lag 0 make runs with equal rows."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(repr(case.rows), case)
    return list(found.values())


def packed(cases: Iterable[Case]) -> dict[str, np.ndarray]:
    """Return cases as arrays: one value per case or, in the order of the cases, one value per row.

    Metrics are `rounded`, so that the file is small. A metric that a row does not have is NaN.
    """
    cases = sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest())
    rows = [row for case in cases for row in case.rows]
    return {
        "name": np.array([case.name for case in cases]),
        "kind": np.array([case.kind for case in cases]),
        "rate": np.array([case.rate for case in cases]),
        "collapse": np.array([math.nan if case.collapse is None else case.collapse for case in cases]),
        "rows": np.array([len(case.rows) for case in cases]),
        "update": np.array([row["update"] for row in rows], np.float32),
        **{name: rounded([row.get(name, math.nan) for row in rows]) for name in METRICS},
    }


def rounded(values: Sequence[float]) -> np.ndarray:
    """Return values as float16; larger values become the largest of float16."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(values, -largest, largest).astype(np.float16)


def stored(arrays: Mapping[str, np.ndarray]) -> list[Case]:
    """Return the cases that `packed` turned into arrays."""
    columns = {name: arrays[name].astype(float).tolist() for name in ("update", *METRICS)}
    ends = np.cumsum(arrays["rows"]).tolist()
    found = []
    for place, end in enumerate(ends):
        span = range(end - int(arrays["rows"][place]), end)
        rows = [{name: each[at] for name, each in columns.items() if not math.isnan(each[at])} for at in span]
        collapse = float(arrays["collapse"][place])
        found.append(
            Case(
                str(arrays["name"][place]),
                str(arrays["kind"][place]),
                float(arrays["rate"][place]),
                rows,
                None if math.isnan(collapse) else collapse,
            )
        )
    return found


def write(file: Path, cases: Sequence[Case]) -> None:
    """Write cases to a file."""
    content = io.BytesIO()
    np.savez_compressed(content, **packed(cases))
    write_atomically(file, content.getvalue())


def read(file: Path) -> list[Case]:
    """Return the cases in a file that `write` wrote.

    Raises:
        UserError: the file does not exist.
    """
    if not file.exists():
        raise UserError(
            f"{file} must exist (it contains the runs of the study); "
            "run: python -m benchmarks.collapse <folder>"
        )
    with np.load(file, allow_pickle=False) as arrays:
        return stored(dict(arrays))
