"""Curves of a figure: the mean over the seeds of a group, with the range or the confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf.core.metrics import Row
    from rlhf.report.runs import Run

    # A function that returns a value of a row, or None if the row has no such value.
    Read = Callable[[Run, Row], float | None]
    Bounds = Callable[[Row], tuple[float, float] | None]  # reads the bounds of a confidence interval

POINTS = 250  # largest number of points of a curve; longer curves are averaged over blocks of updates


@dataclass(frozen=True)
class Point:
    """A point of a curve: statistics over the runs of a group at one update, or averaged over a few updates.

    Attributes:
        x: mean of x over the runs.
        y: mean of y over the runs.
        low: smallest y of a run; for a single run with a confidence interval, the lower bound.
        high: largest y of a run; for a single run with a confidence interval, the upper bound.
        x_low: smallest x of a run.
        x_high: largest x of a run.
    """

    x: float
    y: float
    low: float
    high: float
    x_low: float
    x_high: float


def figure(name: str) -> Read:
    """Return a function that reads the metric `name` from a row of metrics.jsonl."""
    return lambda run, row: row.get(name)


def seconds(run: Run, row: Row) -> float | None:
    """Return the seconds of training that `run` had spent until the update of `row`."""
    return run.seconds_at(row["update"])


def curve(runs: Sequence[Run], x: Read, y: Read, interval: Bounds | None = None) -> list[Point]:
    """Return the curve of y over x, with at most `POINTS` points in the order of updates.

    Rows of different runs are matched by their `update`. Updates at which a run has no x or no y are skipped.

    Args:
        runs: the runs of a group.
        x: returns the x value of a row.
        y: returns the y value of a row.
        interval: returns the bounds of the confidence interval of y; used if there is a single run.
    """
    if interval is not None and len(runs) == 1:
        return _thin(_with_interval(runs[0], x, y, interval))
    values_by_run: list[dict[float, tuple[float, float]]] = []
    for run in runs:
        values: dict[float, tuple[float, float]] = {}
        for row in run.rows:
            y_value = y(run, row)
            x_value = None if y_value is None else x(run, row)
            if x_value is not None and y_value is not None:
                values[row["update"]] = (x_value, y_value)
        values_by_run.append(values)
    points = []
    for update in sorted(set.intersection(*map(set, values_by_run))) if values_by_run else []:
        xs, ys = zip(*(values[update] for values in values_by_run), strict=True)
        points.append(Point(mean(xs), mean(ys), min(ys), max(ys), min(xs), max(xs)))
    return _thin(points)


def _with_interval(run: Run, x: Read, y: Read, interval: Bounds) -> list[Point]:
    """Return the points of one run, whose range is the confidence interval; see `curve`."""
    points = []
    for row in run.rows:
        y_value = y(run, row)
        x_value = None if y_value is None else x(run, row)
        if x_value is not None and y_value is not None:
            low, high = interval(row) or (y_value, y_value)
            points.append(Point(x_value, y_value, low, high, x_value, x_value))
    return points


def _thin(points: list[Point]) -> list[Point]:
    """Return at most `POINTS` points, each the mean of a block of neighbouring points."""
    size = -(-len(points) // POINTS)
    if size <= 1:
        return points
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        Point(*(mean(getattr(point, name) for point in block) for name in Point.__dataclass_fields__))
        for block in blocks
    ]
