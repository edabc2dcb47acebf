"""The figure of the atlas: final value and gold score at a KL, against lag and against N, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study
from rlhf.core.statistics import mean_interval
from rlhf.report.curves import Point
from rlhf.report.groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Values = Callable[[Cell], Sequence[float]]  # the values that a panel shows at a cell, one per seed

PER_PANEL = 7  # methods of a panel, one colour each
HEIGHT = 3.2  # inches of a panel


def png(study: Study) -> bytes:
    """Return the figure: a row per task, per kind of staleness and per value, the methods in two columns."""
    from rlhf.report.drawing import Chart, Panel

    design = study.design
    names = list(design.methods)
    columns = [names[start : start + PER_PANEL] for start in range(0, len(names), PER_PANEL)]
    panels = []
    for task in design.tasks:
        for key, levels, label in (
            ("lag", design.lags, "lag (schedule.max_lag)"),
            ("minibatches", design.minibatches, "N (optimizer steps per rollout batch)"),
        ):
            cells = {
                method: [design.cell(task, method, **{key: level}) for level in levels] for method in names
            }
            for title, values in measured(study, task):
                for methods in columns:
                    drawn = {method: cells[method] for method in methods}
                    panels.append(Panel(drawer(drawn, values, levels, label, f"{task}: {title}"), HEIGHT))
    return Chart(design.figure.stem, "", "", panels).png()


def measured(study: Study, task: str) -> Iterator[tuple[str, Values]]:
    """Yield the title and the values of each row of panels of a task."""
    yield study.design.tasks[task].label, lambda cell: list(study.values(cell).values())
    yield f"gold score at KL {study.design.tasks[task].kl:g}", lambda cell: reached(study, cell)


def reached(study: Study, cell: Cell) -> list[float]:
    """Return the gold scores at the KL of the task; none if at most half of the runs reach the KL."""
    found = study.at_kl(cell)
    return list(found.values()) if 2 * len(found) > len(study.of(cell)) else []


def drawer(
    cells: dict[str, list[Cell]], values: Values, levels: Sequence[int], label: str, title: str
) -> Callable[[Axes], None]:
    """Return a function that draws one panel; lags and N have equal distances on the x axis.

    Args:
        cells: the cells of each method, one per level.
        values: returns the values of a cell; without values, the line of the method has a gap.
        levels: the lags or N.
        label: label of the x axis.
        title: title of the panel.
    """
    from rlhf.report.drawing import trace

    def draw(axes: Axes) -> None:
        for place, (method, row) in enumerate(cells.items()):
            points = [point_of(values(cell), x) for x, cell in enumerate(row)]
            if not all(math.isnan(point.y) for point in points):
                trace(axes, Group(method, (), place, place), points, True, band=True)
                axes.lines[-1].set_label(method)
        axes.set_xticks(range(len(levels)), list(map(str, levels)))
        axes.set(xlabel=label, title=title)
        if axes.lines:
            axes.legend(fontsize=7, ncols=2)

    return draw


def point_of(values: Sequence[float], x: float) -> Point:
    """Return the mean of the values with its t interval; nan without values."""
    if not values:
        return Point(x, math.nan, math.nan, math.nan, x, x)
    found = mean_interval(values)
    low, high = (found.centre if math.isnan(bound) else bound for bound in (found.low, found.high))
    return Point(x, found.centre, low, high, x, x)
