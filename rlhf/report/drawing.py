"""Drawing with matplotlib: curves of groups, axes, legends, and output as PNG and SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from rlhf.report.groups import Group
    from rlhf.report.runs import Metric, Run


# The colour-blind-safe palette of Okabe and Ito, with a grey and a wine red instead of black and yellow.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5f66", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GLYPHS = ("\N{BLACK CIRCLE}", "\N{BLACK SQUARE}", "\N{BLACK UP-POINTING TRIANGLE}", "\N{BLACK DIAMOND}",
          "\N{BLACK DOWN-POINTING TRIANGLE}", "\N{HEAVY GREEK CROSS}", "\N{HEAVY MULTIPLICATION X}",
          "\N{BLACK STAR}")  # fmt: skip

INK, FAINT, RULE, PAPER = "#1b1f24", "#636b76", "#dde1e6", "#fefefe"

# Colour -> variable of page.css, which has a value for the light and the dark theme.
_VARIABLES = {
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
    "axes.titlesize": 10,
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
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a character, not mathematics
}

_DECIMALS = re.compile(r"(\d\.\d)\d+")  # decimals of a coordinate after the first
_UNFINISHED = (0, (2, 2))  # line style of unfinished runs
WIDTH, HEIGHT = 4.8, 3.1  # inches of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.74, 0.3, 0.42, 0.5  # inches of a panel beside its axes
_LEGEND_ROW, _LEGEND_COLUMN, _CHARACTER = 0.22, 0.6, 0.095  # inches in the legend of a PNG file


@dataclass(frozen=True)
class Key:
    """An entry of a legend.

    Attributes:
        label: text of the entry.
        colour: colour of the line or bar.
        index: index of the group; None if the entry is not a group.
        place: place of the group, which determines the marker; None for a bar or for unfinished runs.
        dashed: whether the entry is the line of unfinished runs.
    """

    label: str
    colour: str
    index: int | None = None
    place: int | None = None
    dashed: bool = False

    @property
    def glyph(self) -> str:
        """The marker as a character, for the legend of the page."""
        if self.dashed:
            return "\N{MULTIPLICATION SIGN}"
        return GLYPHS[1 if self.place is None else self.place % len(GLYPHS)]

    @property
    def paint(self) -> str:
        """The colour as a CSS value."""
        return f"var({_VARIABLES[self.colour]})" if self.colour in _VARIABLES else self.colour

    def handle(self) -> Any:
        """Return the entry as an artist of matplotlib, for the legend of a PNG file."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        if self.dashed:
            return Line2D([], [], color=self.colour, linestyle=_UNFINISHED, linewidth=1.0, marker="x")
        return Patch(color=self.colour) if self.place is None else Line2D([], [], **_look(self.place))


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a figure.

    Attributes:
        draw: draws the content on the axes.
        height: height in inches, with labels and title.
    """

    draw: Callable[[Axes], object]
    height: float = HEIGHT


@dataclass(frozen=True)
class Chart:
    """A figure with its texts.

    Attributes:
        name: file name without suffix, and id of the section on the page.
        title: heading of the section.
        caption: what the figure shows and how its values are computed.
        panels: the panels; the page shows as many in a row as fit.
        keys: entries of the legend; empty for no legend.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    keys: Sequence[Key] = ()

    def image(self, form: str) -> bytes:
        """Return the figure as an image file: the panels two in a row, and the legend below the panels.

        The size of the axes does not depend on the legend. Equal figures give equal bytes.

        Args:
            form: "png" (on white), "pdf" or "svg".
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        columns = min(len(self.panels), 2)
        rows = [self.panels[i : i + columns] for i in range(0, len(self.panels), columns)]
        width = max(WIDTH * columns, 6.4)
        longest = max((len(key.label) for key in self.keys), default=0)
        across = max(1, int(width / (_CHARACTER * longest + _LEGEND_COLUMN)))
        below = _LEGEND_ROW * -(-len(self.keys) // across) + 0.2 if self.keys else 0.0
        height = sum(max(panel.height for panel in row) for row in rows) + below
        out = io.BytesIO()
        with rc_context({**STYLE, "svg.hashsalt": self.name}):
            drawing = Figure(figsize=(width, height))
            top = height
            for row in rows:
                for place, panel in enumerate(row):
                    panel.draw(axes_at(drawing, WIDTH * place, top - panel.height, panel.height))
                top -= max(panel.height for panel in row)
            if self.keys:
                handles, labels = [key.handle() for key in self.keys], [key.label for key in self.keys]
                drawing.legend(handles, labels, loc="lower left", ncols=across, borderaxespad=0.2)
            undated = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[form]
            drawing.savefig(out, format=form, dpi=160, facecolor="white", metadata=undated)
        return out.getvalue()

    def svg(self) -> list[str]:
        """Return each panel as an SVG element for the page, without legend.

        Colours and font come from the style sheet of the page. The elements of group i have the classes
        `series` and `series-i`.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        made = []
        for place, panel in enumerate(self.panels):
            salt = f"{self.name}-{place}"  # element ids are unique on the page
            out = io.StringIO()
            with rc_context({**STYLE, "svg.hashsalt": salt}):
                drawing = Figure(figsize=(WIDTH, panel.height))
                panel.draw(axes_at(drawing, 0.0, 0.0, panel.height))
                drawing.savefig(out, format="svg", transparent=True)
            made.append(_as_element(out.getvalue()))
        return made


def axes_at(drawing: Figure, left: float, bottom: float, height: float) -> Axes:
    """Add the axes of a panel to a figure and return the axes.

    Args:
        drawing: the figure.
        left: inches from the left edge of the figure to the panel.
        bottom: inches from the lower edge of the figure to the panel.
        height: inches of the panel, with labels and title.
    """
    across, up = drawing.get_size_inches()
    size = (WIDTH - _LEFT - _RIGHT) / across, (height - _TOP - _BOTTOM) / up
    return drawing.add_axes(((left + _LEFT) / across, (bottom + _BOTTOM) / up, *size))


def _as_element(text: str) -> str:
    """Return an SVG file as an element that takes its colours from the style sheet of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    text = re.sub(r' d="[^"]*"', lambda path: _DECIMALS.sub(r"\1", path[0]), text)  # a tenth of a point
    text = re.sub(r'id="(series-\d+)"', r'class="series \1"', text)
    named = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in named else "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def lines(group: Group, x: str, metric: Metric) -> Iterator[tuple[DataFrame, bool]]:
    """Yield the curves of a group (see `curve`) and whether the curve is finished.

    The first curve is that of the finished runs (True). The second curve is that of the unfinished run with
    the most updates (False).
    """
    for runs, finished in ((group.finished, True), (group.furthest, False)):
        if runs and len(points := curve(runs, x, metric)):
            yield points, finished


def trace(axes: Axes, group: Group, points: DataFrame, finished: bool = True, band: bool = True) -> None:
    """Draw a curve, with its range if `band`; unfinished curves are dashed and end in a cross."""
    style = look(group)
    if not finished:
        style |= {"linestyle": _UNFINISHED, "linewidth": 1.0, "marker": ""}
    elif len(points) > 25:
        style["marker"] = ""
    axes.plot(points.x, points.y, **style)
    if not finished:
        cross = {"marker": "x", "markersize": 6, "markeredgecolor": style["color"]}
        axes.plot(points.x[-1:], points.y[-1:], **{**style, **cross})
    elif band and (points.low < points.high).any():
        area = {"color": style["color"], "gid": style["gid"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(points.x, points.low, points.high, **area)


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only, for updates and episodes."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def plain_labels(axis: Axis) -> None:
    """Label each tick with its full value: thousands as "k", and no common factor or offset."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None) -> str:
        low, high = axis.get_view_interval()
        if abs(value) < 1e-9 * (high - low):  # rounding error of the tick position
            value = 0.0
        scale, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k") if abs(value) >= 1e4 else (1.0, "")
        return f"{value / scale:.8g}{unit}".replace("-", "\N{MINUS SIGN}")

    axis.set_major_formatter(FuncFormatter(label))


def look(group: Group) -> dict[str, Any]:
    """Return colour, marker and id (a class in an SVG) of a group, as arguments of matplotlib."""
    return {**_look(group.place or 0), "gid": f"series-{group.index}"}


def _look(place: int) -> dict[str, Any]:
    return {
        "color": SERIES[place % len(SERIES)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 5,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.7,
    }


def legend(groups: Sequence[Group]) -> list[Key]:
    """Return the legend of `groups`; a single finished group needs no legend."""
    keys = [
        Key(group.label, SERIES[(group.place or 0) % len(SERIES)], group.index, group.place)
        for group in groups
    ]
    unfinished = any(group.unfinished for group in groups)
    if unfinished:
        keys.append(Key("unfinished run", FAINT, dashed=True))
    return keys if len(groups) > 1 or unfinished else []


# Curves of a figure: the mean over the seeds of a group, with the range or the confidence interval.


POINTS = 250  # largest number of points of a curve; longer curves are averaged over blocks of updates


def curve(runs: Sequence[Run], x: str, metric: Metric) -> DataFrame:
    """Return the curve of a metric over x, with at most `POINTS` points in the order of updates.

    Rows of different runs are matched by their `update`. Updates at which a run has no x or no y are skipped.

    Args:
        runs: the runs of a group.
        x: a column of `Run.frame`.
        metric: the metric; a metric of training is read from the rows of updates only.

    Returns:
        Columns `x` and `y` (means over the runs), `low` and `high` (smallest and largest y of a run; of a
        single run the bounds of the confidence interval, if it has one), `x_low` and `x_high`.
    """
    import pandas

    tables = []
    for run in runs:
        names = ["update", x, *(f"{metric.name}{end}" for end in ("", "_low", "_high", "_ci95"))]
        rows = run.frame if metric.evaluated else run.frame[run.frame["trained"]]
        table = rows.reindex(columns=names).set_axis(["update", "x", "y", "low", "high", "half"], axis=1)
        table = table.dropna(subset=["x", "y"]).drop_duplicates("update", keep="last")
        if len(runs) > 1:
            table[["low", "high", "half"]] = np.nan
        half = table["half"].fillna(0.0)
        low, high = table["low"].fillna(table["y"] - half), table["high"].fillna(table["y"] + half)
        tables.append(table.assign(low=low, high=high))
    of_update = pandas.concat(tables).groupby("update")
    columns = {"x": ("x", "mean"), "y": ("y", "mean"), "low": ("low", "min"), "high": ("high", "max")}
    points = of_update.agg(**columns, x_low=("x", "min"), x_high=("x", "max"))
    points = points[of_update.size() == len(runs)]
    size = -(-len(points) // POINTS)
    return points.groupby(np.arange(len(points)) // size).mean() if size > 1 else points
