"""The figure of the atlas: final value against lag and against N, per task, with intervals as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.atlas import analysis
from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study
from rlhf.report.curves import Point
from rlhf.report.groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PER_PANEL = 7  # methods of a panel, one colour each
HEIGHT = 3.6  # inches of a panel


def png(study: Study) -> bytes:
    """Return the figure: a row per task and per kind of staleness, with the methods in two columns."""
    from rlhf.report.drawing import Chart, Panel

    design = study.design
    names = list(design.methods)
    columns = [names[start : start + PER_PANEL] for start in range(0, len(names), PER_PANEL)]
    panels = []
    for task in design.tasks:
        for key, values, label in (
            ("lag", design.lags, "lag (schedule.max_lag)"),
            ("minibatches", design.minibatches, "N (optimizer steps per rollout batch)"),
        ):
            panels += [Panel(drawer(study, task, key, values, label, methods), HEIGHT) for methods in columns]
    return Chart(design.figure.stem, "", "", panels).png()


def drawer(
    study: Study, task: str, key: str, values: Sequence[int], label: str, methods: Sequence[str]
) -> Callable[[Axes], None]:
    """Return a function that draws one panel; lags and N have equal distances on the x axis."""
    from rlhf.report.drawing import trace

    def draw(axes: Axes) -> None:
        for place, method in enumerate(methods):
            cells = [study.design.cell(task, method, **{key: value}) for value in values]
            points = [point for x, cell in enumerate(cells) if (point := at(study, cell, x)) is not None]
            if points:
                trace(axes, Group(method, (), place, place), points, True, band=True)
                axes.lines[-1].set_label(method)
        axes.set_xticks(range(len(values)), list(map(str, values)))
        axes.set(xlabel=label, title=f"{task}: {study.design.tasks[task].label}")
        if axes.lines:
            axes.legend(fontsize=7, ncols=2)

    return draw


def at(study: Study, cell: Cell, x: float) -> Point | None:
    """Return the interquartile mean of a cell with its interval; None without runs."""
    found = analysis.estimate(list(study.values(cell).values()))
    if found is None:
        return None
    low, high = (found.centre if math.isnan(bound) else bound for bound in (found.low, found.high))
    return Point(x, found.centre, low, high, x, x)
