"""Figures of a study: a quantity over an axis, with the intervals of the tables as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf.report.curves import Point
from rlhf.report.drawing import Chart, Panel, trace
from rlhf.report.groups import Group
from rlhf.study.results import Results
from rlhf.study.tables import Shown, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PER_PANEL = 7  # methods of a panel, one colour each


def figures(results: Results, forms: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the content of each figure of a study; all tasks are in one figure.

    Methods are in several panels if they are many. A value is drawn if more than half of the runs have it.

    Args:
        results: the rows of the study.
        forms: of "png", "pdf" and "svg".
    """
    for declared in results.spec.figures:
        panels = []
        for table in tables(results, [declared]):
            methods = list(table.rows)
            parts = [methods[start : start + _PER_PANEL] for start in range(0, len(methods), _PER_PANEL)]
            panels += [Panel(_drawer(table, part)) for part in parts]
        chart = Chart(declared.file_name, "", "", panels)
        for form in forms if panels else ():
            yield f"{chart.name}.{form}", chart.image(form)


def _drawer(table: Shown, methods: Sequence[str]) -> Callable[[Axes], None]:
    """Return a function that draws a panel; values of the axis have equal distances."""

    def draw(axes: Axes) -> None:
        for place, method in enumerate(methods):
            points = []
            for x, entry in enumerate(table.rows[method]):
                estimate, drawn = entry.estimate, 2 * entry.having > entry.runs
                bounds = estimate[:3] if drawn else (math.nan,) * 3
                points.append(Point(x, *bounds, x, x))
            if not all(math.isnan(point.y) for point in points):
                trace(axes, Group(method, (), place, place), points, True, band=True)
                axes.lines[-1].set_label(method)
        axes.set_xticks(range(len(table.columns)), [column.rpartition(" ")[2] for column in table.columns])
        axes.set(xlabel=table.table.axis, title=f"{table.task}: {table.title}")
        if axes.lines:
            axes.legend(fontsize=7, ncols=2)

    return draw
