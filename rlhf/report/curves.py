"""Curves of a figure: the mean over the seeds of a group, with the range or the confidence interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf.core.metrics import Row
    from rlhf.report.runs import Run

    # A function that returns a value of a row, or None if the row has no such value.
    Read = Callable[[Run, Row], float | None]
    Bounds = Callable[[Row], tuple[float, float] | None]  # reads the bounds of a confidence interval

POINTS = 250  # largest number of points of a curve; longer curves are averaged over blocks of updates


class Point(NamedTuple):
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
    bounds = interval if len(runs) == 1 else None
    by_run = [dict(_points(run, x, y, bounds)) for run in runs]
    shared = sorted(set.intersection(*map(set, by_run))) if by_run else []
    return _thin([_merged([points[update] for points in by_run]) for update in shared])


def _points(run: Run, x: Read, y: Read, interval: Bounds | None) -> Iterator[tuple[float, Point]]:
    """Yield update and point of each row of a run that has x and y."""
    for row in run.rows:
        if (y_value := y(run, row)) is not None and (x_value := x(run, row)) is not None:
            low, high = (interval and interval(row)) or (y_value, y_value)
            yield row["update"], Point(x_value, y_value, low, high, x_value, x_value)


def _merged(points: Sequence[Point]) -> Point:
    """Return the point of a group from those of its runs."""
    xs, ys, low, high, *_ = zip(*points, strict=True)
    return Point(fmean(xs), fmean(ys), min(low), max(high), min(xs), max(xs))


def _thin(points: list[Point]) -> list[Point]:
    """Return at most `POINTS` points, each the mean of a block of neighbouring points."""
    size = -(-len(points) // POINTS)
    if size <= 1:
        return points
    blocks = (points[i : i + size] for i in range(0, len(points), size))
    return [Point(*map(fmean, zip(*block, strict=True))) for block in blocks]
