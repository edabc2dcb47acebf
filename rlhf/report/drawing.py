"""Drawing of figures with matplotlib: curves, axes, legends, the timeline."""

from __future__ import annotations

import io
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappush, heapreplace
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from rlhf.core.metrics import Row
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import Run


# Drawing of figures with matplotlib: colours, curves, axes, legends, and output as PNG and SVG.


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
LEFT, RIGHT, TOP, BOTTOM = 0.74, 0.3, 0.42, 0.5  # inches of a panel beside its axes
LEGEND_ROW, LEGEND_COLUMN, CHARACTER = 0.22, 0.6, 0.095  # inches in the legend of a PNG file


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
        return Patch(color=self.colour) if self.place is None else Line2D([], [], **look(self.place))


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

    def png(self) -> bytes:
        """Return the figure as PNG on white (see `image`)."""
        return self.image("png")

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
        across = max(1, int(width / (CHARACTER * longest + LEGEND_COLUMN)))
        below = LEGEND_ROW * -(-len(self.keys) // across) + 0.2 if self.keys else 0.0
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
            with rc_context({**STYLE, "svg.hashsalt": salt}):
                drawing = Figure(figsize=(WIDTH, panel.height))
                panel.draw(axes_at(drawing, 0.0, 0.0, panel.height))
                made.append(_as_element(drawing))
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
    size = (WIDTH - LEFT - RIGHT) / across, (height - TOP - BOTTOM) / up
    return drawing.add_axes(((left + LEFT) / across, (bottom + BOTTOM) / up, *size))


def _as_element(drawing: Figure) -> str:
    """Return a figure as an SVG element that takes its colours from the style sheet of the page."""
    out = io.StringIO()
    drawing.savefig(out, format="svg", transparent=True)
    text = out.getvalue()
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


def lines(
    group: Group, x: Read, y: Read, interval: Bounds | None = None
) -> Iterator[tuple[list[Point], bool]]:
    """Yield the curves of a group and whether the curve is finished.

    The first curve is that of the finished runs (True). The second curve is that of the unfinished run with
    the most updates (False).
    """
    if points := curve(group.finished, x, y, interval):
        yield points, True
    if group.furthest is not None and (points := curve([group.furthest], x, y, interval)):
        yield points, False


def draw_all(axes: Axes, groups: Sequence[Group], x: Read, y: Read, interval: Bounds | None = None) -> None:
    """Draw the curves of groups, with the range over seeds or the confidence interval as a band."""
    for group in groups:
        for points, finished in lines(group, x, y, interval):
            trace(axes, group, points, finished, band=True)


def trace(axes: Axes, group: Group, points: list[Point], finished: bool, band: bool) -> None:
    """Draw a curve, with its range if `band`; unfinished curves are dashed and end in a cross."""
    style = look(group.place or 0)
    if not finished:
        style |= {"linestyle": _UNFINISHED, "linewidth": 1.0, "marker": ""}
    elif len(points) > 25:
        style["marker"] = ""
    xs, ys, low, high, *_ = zip(*points, strict=True)
    axes.plot(xs, ys, gid=mark(group), **style)
    if not finished:
        cross = {"marker": "x", "markersize": 6, "markeredgecolor": style["color"]}
        axes.plot(xs[-1:], ys[-1:], gid=mark(group), **{**style, **cross})
    if band and finished and any(point.low < point.high for point in points):
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.16, linewidth=0, gid=mark(group))


def crosshair(axes: Axes, group: Group, point: Point) -> None:
    """Draw a large point with its ranges in x and y."""
    style = look(group.place or 0)
    gid = mark(group)
    axes.plot([point.x_low, point.x_high], [point.y, point.y], color=style["color"], linewidth=1.2, gid=gid)
    axes.plot([point.x, point.x], [point.low, point.high], color=style["color"], linewidth=1.2, gid=gid)
    axes.plot([point.x], [point.y], gid=gid, **{**style, "markersize": 9})


def widen(axes: Axes, smallest: float) -> None:
    """Make the y axis at least `smallest` high, so that tiny differences do not look like changes."""
    low, high = axes.get_ylim()
    if high - low < smallest:
        middle = (high + low) / 2
        axes.set_ylim(middle - smallest / 2, middle + smallest / 2)


def within_a_rate(axes: Axes) -> None:
    """Limit the y axis to the range 0 to 1, with a margin."""
    low, high = axes.get_ylim()
    margin = 0.04 * (high - low)
    axes.set_ylim(max(low, -margin), min(high, 1 + margin))


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


def mark(group: Group) -> str:
    """Return the id of drawn elements of `group`; `_as_element` turns the id into a class."""
    return f"series-{group.index}"


def look(place: int) -> dict[str, Any]:
    """Return the colour and marker of the group at `place`, as arguments of matplotlib."""
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


def bar(axes: Axes, at: float, height: float, left: float, width: float, colour: str) -> float:
    """Draw one part of a stacked horizontal bar and return its width."""
    if width:
        axes.barh(at, width, height, left=left, color=colour)
    return width


# Curves of a figure: the mean over the seeds of a group, with the range or the confidence interval.


if TYPE_CHECKING:
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


# The figure of groups.jsonl: slots and trainer over time, ages of groups, and which lengths are trained.


_UPDATES = 6  # updates of a timeline: with those before the first and after the last, seven versions
_SLOTS = 32  # largest number of slots of a timeline
_TIMELINES = 4  # largest number of timelines
_PITCH = 0.1  # inches from one slot to the next
_GREY = 6  # index in SERIES; grey is the colour of discarded groups
_COLOURS = SERIES[:_GREY] + SERIES[_GREY + 1 :]  # of versions

_CAPTION = (
    "Timeline: six updates in the middle of the run with the lowest seed. A row is a slot, which decodes "
    "one response after another; gaps are idle time. At most 32 slots are shown, evenly chosen. The colour "
    "is the version of the weights that sample; colours repeat after seven versions. The trainer is on top, "
    "in the colour of the version that it makes; thin lines are loads of weights. Grey: responses of groups "
    "that are discarded or replaced. Tick at the end: the response was cut. Age: updates between the first "
    "token of a group and its training."
)
_DURATION = (
    " Duration: mean time of the samples of a group in their slots, until they ended, were cut or discarded; "
    "a decile is a tenth of all groups that were trained or discarded."
)

_Rows = list[dict[str, Any]]  # rows of groups.jsonl


class Response(NamedTuple):
    """A response in its slot: times of start and end, and whether it was not trained, or cut."""

    start: float
    end: float
    dropped: bool
    cut: bool


def asynchrony(section: Section) -> tuple[Chart | None, list[str]]:
    """Return the figure of the runs in virtual time, and a remark about each file that is damaged."""
    found: dict[Group, list[tuple[Run, _Rows]]] = {}
    remarks = []
    for group in section.drawn:
        for run in group.measured:
            try:
                rows = run.groups() if run.loads else []
                if any("loaded" in row for row in rows):
                    found.setdefault(group, []).append((run, rows))
            except ValueError as error:
                remarks.append(f"groups of {run.folder.name} ({error})")
    every = {group: [row for _, rows in runs for row in rows] for group, runs in found.items()}
    timelines = [
        _timeline(*runs[0], group.label if len(section.groups) > 1 else "timeline")
        for group, runs in list(found.items())[:_TIMELINES]
    ]
    panels, caption = [*timelines, Panel(partial(_draw_ages, every))], _CAPTION
    if any(row["fate"] in ("cut", "dropped") for rows in every.values() for row in rows):
        panels, caption = [*panels, Panel(partial(_draw_deciles, every))], caption + _DURATION
    chart = Chart("asynchrony", "Asynchrony", caption, panels, legend(list(every)))
    return chart if found else None, remarks


def in_slots(responses: Iterable[Response], count: int) -> list[list[Response]]:
    """Return the responses of each slot; a response gets the slot that has been free for the longest time.

    Args:
        responses: responses in any order.
        count: number of slots; more are added if more responses overlap.
    """
    slots: list[list[Response]] = [[] for _ in range(count)]
    free = [(-inf, slot) for slot in range(count)]  # heap: since when a slot is free, or from when on
    for response in sorted(responses):
        if not free or free[0][0] > response.start:
            heappush(free, (-inf, len(slots)))
            slots.append([])
        _, slot = heapreplace(free, (response.end, free[0][1]))
        slots[slot].append(response)
    return slots


def _timeline(run: Run, rows: _Rows, label: str) -> Panel:
    """Return the panel of slots and trainer in the middle of a run."""
    updates = sorted({(row["loaded"], row["taken"]) for row in rows if "loaded" in row})
    loads = [loaded for loaded, _ in updates]
    first = max(0, (len(loads) - _UPDATES) // 2)
    begin, end = [0.0, *loads][first], loads[: first + _UPDATES][-1]
    responses = [
        Response(*times, "loaded" not in row, row["fate"] == "cut" and times[1] == max(row["ends"]))
        for row in rows
        for times in zip(row["starts"], row["ends"], strict=True)
        if times[0] < end and times[1] > begin
    ]
    slots = in_slots(responses, run.config.get("clock.slots") or 0)
    shown = slots[:: -(-len(slots) // _SLOTS)]
    placed = [(y, response) for y, slot in enumerate(shown) for response in slot]
    in_flight = run.config.get("schedule.update") == "in_flight"
    bars = [(y, *piece) for y, response in placed for piece in _pieces(response, loads, in_flight)]
    trainer = [
        (-2.5, taken, loaded - run.config.get("clock.sync_s", 0.0), _colour(version))
        for version, (loaded, taken) in enumerate(updates[first : first + _UPDATES], first + 1)
    ]
    work = sum(min(right, end) - max(left, begin) for _, left, right, _ in trainer)

    def draw(axes: Axes) -> None:
        axes.vlines(loads[max(0, first - 1) : first + _UPDATES], -3.5, len(shown), RULE, linewidth=0.8)
        axes.hlines(*zip(*bars, *trainer, strict=True), linewidth=72 * _PITCH * 0.8)
        ends = [
            (each.end, y - 0.45, y + 0.45, INK if each.cut else PAPER, 1.6 if each.cut else 0.8)
            for y, each in placed
        ]
        *at, widths = zip(*ends, strict=True)
        axes.vlines(*at, linewidth=widths)
        axes.set(xlim=(begin, end), ylim=(len(shown), -3.5), xlabel="virtual time (seconds)", title=title)
        axes.set_yticks([-2.5, (len(shown) - 1) / 2], ["trainer", "slots"])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        plain_labels(axes.xaxis)

    title = f"{label}\ntrainer works {100 * work / (end - begin):.0f} % of this time"
    return Panel(draw, 1.0 + _PITCH * (len(shown) + 4))


def _pieces(response: Response, loads: list[float], in_flight: bool) -> Iterator[tuple[float, float, str]]:
    """Yield begin, end and colour of the parts of a response that different versions sampled."""
    version = bisect_right(loads, response.start)
    later = loads[version : bisect_left(loads, response.end)] if in_flight else []
    for begin, end in pairwise([response.start, *later, response.end]):
        yield begin, end, FAINT if response.dropped else _colour(version)
        version += 1


def _colour(version: int) -> str:
    return _COLOURS[version % len(_COLOURS)]


def _draw_ages(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the distribution of the ages of the trained groups."""
    for group, own in rows.items():
        ages = [row["update"] - 1 - row["version"] for row in own if "loaded" in row]
        shares, edges = np.histogram(ages, np.arange(max(ages) + 2) - 0.5, density=True)
        colour = look(group.place or 0)["color"]
        axes.stairs(shares, edges, color=colour, fill=len(rows) == 1, linewidth=1.8, gid=mark(group))
    axes.set(title="ages of trained groups", xlabel="age (updates)", ylabel="share")
    whole_numbers(axes.xaxis)


def _draw_deciles(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the share of groups that are trained whole, by decile of the duration of all groups."""
    for group, own in rows.items():
        own = [row for row in own if row["fate"] != "replaced"]  # they were decoded whole
        ordered = sorted(own, key=lambda row: (sum(row["ends"]) - sum(row["starts"])) / len(row["ends"]))
        deciles = np.array_split([row["fate"] == "trained" for row in ordered], 10)
        points = [(decile, whole.mean()) for decile, whole in enumerate(deciles, 1) if len(whole)]
        axes.plot(*zip(*points, strict=True), gid=mark(group), **look(group.place or 0))
    axes.set(
        title="groups that are trained whole", xlabel="decile of duration", ylabel="share", ylim=(-0.04, 1.04)
    )
    axes.set_xticks(range(1, 11))
