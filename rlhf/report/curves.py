"""One curve a group: the mean over its seeds, and their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from rlhf.core.metrics import Row
from rlhf.report.runs import Run

POINTS = 250  # of a curve at most; above it, a point is the mean of a block of updates


Read = Callable[[Run, Row], float | None]


@dataclass(frozen=True)
class Point:
    """One update (or the mean of some): over the runs, the mean of x, and of y with its least and largest."""

    x: float
    y: float
    low: float
    high: float
    x_low: float
    x_high: float


def figure(name: str) -> Read:
    """Read a figure by its name in metrics.jsonl."""
    return lambda run, row: row.get(name)


def seconds(run: Run, row: Row) -> float | None:
    """Seconds of training until a row."""
    return run.seconds_at(row["update"])


def curve(runs: Sequence[Run], x: Read, y: Read) -> list[Point]:
    """The points at which all of `runs` have x and y, by update; rows are matched by `update`."""
    points = []
    by_update: list[dict[float, tuple[float, float]]] = []
    for run in runs:
        found: dict[float, tuple[float, float]] = {}
        for row in run.rows:
            value = y(run, row)
            at = None if value is None else x(run, row)
            if at is not None and value is not None:
                found[row["update"]] = (at, value)
        by_update.append(found)
    shared = sorted(set.intersection(*map(set, by_update))) if by_update else []
    for update in shared:
        xs, ys = zip(*(found[update] for found in by_update), strict=True)
        points.append(Point(mean(xs), mean(ys), min(ys), max(ys), min(xs), max(xs)))
    return thin(points)


def thin(points: list[Point]) -> list[Point]:
    """At most `POINTS` points, each the mean of a block of neighbours."""
    size = -(-len(points) // POINTS)
    if size <= 1:
        return points
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        Point(*(mean(getattr(point, name) for point in block) for name in Point.__dataclass_fields__))
        for block in blocks
    ]
