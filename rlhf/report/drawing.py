"""Drawing of figures with matplotlib: colours, panels, curves, legends, and output as PNG and SVG."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.report.curves import curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from rlhf.report.curves import Point, Read
    from rlhf.report.groups import Group

# The colour-blind-safe palette of Okabe and Ito, with a grey instead of black and yellow.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5f66")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (6, 1.5)), (0, (1, 1)))  # the line style changes when the colours repeat

INK, FAINT, RULE, PAPER = "#1b1f24", "#636b76", "#dde1e6", "#fefefe"

# Colour -> variable of page.css, which has a value for the light and the dark theme.
VARIABLES = {
    INK: "--ink",
    FAINT: "--faint",
    RULE: "--rule",
    PAPER: "--paper",
    **{colour: f"--series-{i}" for i, colour in enumerate(SERIES)},
}

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a character, not mathematics
}

UNFINISHED = (0, (2, 2))  # line style of unfinished runs


@dataclass(frozen=True)
class Chart:
    """A figure with its texts.

    Attributes:
        name: file name without suffix, and id of the section on the page.
        title: heading of the section.
        caption: what the figure shows and how its values are computed.
        drawing: the matplotlib figure.
    """

    name: str
    title: str
    caption: str
    drawing: Figure

    def png(self) -> bytes:
        """Return the figure as PNG on white, at twice the resolution of the page."""
        out = io.BytesIO()
        self.drawing.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
        return out.getvalue()

    def svg(self) -> str:
        """Return the figure as an SVG element for the page.

        Colours and font come from the style sheet of the page. The elements of group i have the classes
        `series` and `series-i`.
        """
        from matplotlib import rc_context

        out = io.StringIO()
        with rc_context({**STYLE, "svg.hashsalt": self.name}):  # element ids are unique on the page
            self.drawing.savefig(out, format="svg", transparent=True)
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
        text = re.sub(r'id="(series-\d+)"', r'class="series \1"', text)
        named = set(re.findall(r"#([\w-]+)", text))
        text = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in named else "", text)
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        return text


def panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, two in a row, each `height` inches high."""
    from matplotlib.figure import Figure

    columns = min(count, 2)
    rows = -(-count // columns)
    drawing = Figure(figsize=(9.6, height * rows + 0.4))
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return drawing, axes[:count]


def lines(group: Group, x: Read, y: Read) -> Iterator[tuple[list[Point], bool]]:
    """Yield the curves of a group and whether the curve is finished.

    The first curve is that of the finished runs (True). Each unfinished run has a curve of its own (False).
    """
    if points := curve(group.finished, x, y):
        yield points, True
    for run in group.unfinished:
        if points := curve([run], x, y):
            yield points, False


def draw_all(axis: Axes, groups: Sequence[Group], x: Read, y: Read, only: str | None = None) -> None:
    """Draw the curves of all groups. If `only` is set, rows without the metric `only` are skipped."""
    read: Read = (lambda run, row: y(run, row) if only in row else None) if only else y
    for group in groups:
        for points, finished in lines(group, x, read):
            trace(axis, group, points, finished, band=len(group.finished) > 1)


def trace(axis: Axes, group: Group, points: list[Point], finished: bool, band: bool) -> None:
    """Draw a curve, with the range over seeds if `band`; unfinished curves are dashed and end in a cross."""
    look = style(group)
    if not finished:
        look |= {"linestyle": UNFINISHED, "linewidth": 1.0, "marker": ""}
    elif len(points) > 25:
        look["marker"] = ""
    xs, ys = [point.x for point in points], [point.y for point in points]
    axis.plot(xs, ys, gid=mark(group), **look)
    if not finished:
        axis.plot(
            xs[-1:],
            ys[-1:],
            gid=mark(group),
            **{**look, "marker": "x", "markersize": 6, "markeredgecolor": look["color"]},
        )
    if band and finished:
        axis.fill_between(
            xs,
            [point.low for point in points],
            [point.high for point in points],
            color=look["color"],
            alpha=0.16,
            linewidth=0,
            gid=mark(group),
        )


def crosshair(axis: Axes, group: Group, point: Point) -> None:
    """Draw a large point with its ranges over seeds in x and y."""
    look = style(group)
    gid = mark(group)
    axis.plot([point.x_low, point.x_high], [point.y, point.y], color=look["color"], linewidth=1.2, gid=gid)
    axis.plot([point.x, point.x], [point.low, point.high], color=look["color"], linewidth=1.2, gid=gid)
    axis.plot([point.x], [point.y], gid=gid, **{**look, "markersize": 10})


def widen(axis: Axes, name: str) -> None:
    """Set the y axis to the range 0 to 1 if the metric `name` is a rate whose values are all equal."""
    low, high = axis.dataLim.intervaly
    if name in ("eval/win_rate", "eval/accuracy") and high - low < 0.001:
        axis.set_ylim(-0.03, 1.03)


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only, for updates and episodes."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def whole_labels(axis: Axes) -> None:
    """Label each tick of the y axis with its full value, instead of a common factor beside the title."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None) -> str:
        low, high = axis.get_ylim()
        zero = abs(value) < 1e-9 * (high - low)  # rounding error of the tick position
        return f"{0 if zero else value:.8g}".replace("-", "\N{MINUS SIGN}")

    axis.yaxis.set_major_formatter(FuncFormatter(label))


def mark(group: Group) -> str:
    """Return the id of drawn elements of `group`; `Chart.svg` turns the id into a class."""
    return f"series-{group.index}"


def style(group: Group) -> dict[str, Any]:
    """Return the colour, marker and line style of a group."""
    return {
        "color": SERIES[group.place % len(SERIES)],
        "marker": MARKERS[group.place % len(MARKERS)],
        "linestyle": LINES[group.place // len(SERIES) % len(LINES)],
        "markersize": 5.5,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.7,
    }


def legend(drawing: Figure, groups: Sequence[Group]) -> None:
    """Draw a legend of the groups above the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], gid=mark(group), **style(group)) for group in groups]
    labels = [wrapped(group.label) for group in groups]
    longest = max(map(len, "\n".join(labels).split("\n")))
    columns = max(1, min(len(groups), 100 // (longest + 8)))
    if any(group.unfinished for group in groups):
        handles.append(Line2D([], [], color=FAINT, linestyle=UNFINISHED, linewidth=1.0, marker="x"))
        labels.append("unfinished run")
    made = drawing.legend(handles, labels, loc="outside upper left", ncols=columns)
    for group, text in zip(groups, made.get_texts(), strict=False):
        text.set_gid(mark(group))


def wrapped(label: str) -> str:
    """Return a label broken into lines of at most 44 characters."""
    return "\n".join(textwrap.wrap(label, 44, break_long_words=False, break_on_hyphens=False))


def bar(axis: Axes, at: float, height: float, left: float, width: float, colour: str) -> float:
    """Draw one part of a stacked horizontal bar and return its width."""
    if width:
        axis.barh(at, width, height, left=left, color=colour)
    return width
