"""Figures of a section: results vs. KL and vs. time, learning curves, optimization, lag, time per phase."""

from __future__ import annotations

import io
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf.config.schema import data_file
from rlhf.report.runs import LEARNING, METRICS, OFF_POLICY, OPTIMIZATION, UNITS, Kind, Metric, Run, load
from rlhf.report.tables import Group, Section, by_scale, capital, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from pandas import DataFrame

log = logging.getLogger(__name__)

# Drawing with matplotlib: curves of groups, axes, legends, and output as PNG and SVG.


# The colour-blind-safe palette of Okabe and Ito, with a grey and a wine red instead of black and yellow.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5f66", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GLYPHS = "●■▲◆▼✚✖★"  # a character for each marker

_INK, _FAINT, _RULE, _PAPER = "#1b1f24", "#636b76", "#dde1e6", "#fefefe"

# Colour -> variable of page.css, which has a value for the light and the dark theme.
_VARIABLES = {
    _INK: "--ink",
    _FAINT: "--faint",
    _RULE: "--rule",
    _PAPER: "--paper",
    **{colour: f"--series-{i}" for i, colour in enumerate(SERIES)},
}

STYLE = str(files("rlhf.report") / "figures.mplstyle")

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


class Panel(NamedTuple):
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
        columns = min(len(self.panels), 2)
        rows = [self.panels[i : i + columns] for i in range(0, len(self.panels), columns)]
        return _saved(rows, max(WIDTH * columns, 6.4), self.name, form, self.keys, facecolor="white")

    def svg(self) -> list[str]:
        """Return each panel as an SVG element for the page, without legend.

        Colours and font come from the style sheet of the page. The elements of group i have the classes
        `series` and `series-i`. Element ids are unique on the page.
        """
        made = []
        for place, panel in enumerate(self.panels):
            image = _saved([[panel]], WIDTH, f"{self.name}-{place}", "svg", (), transparent=True)
            made.append(_as_element(image.decode()))
        return made


def _saved(
    rows: Sequence[Sequence[Panel]], width: float, salt: str, form: str, keys: Sequence[Key], **options: Any
) -> bytes:
    """Return rows of panels as an image file, with a legend below; equal panels give equal bytes.

    Args:
        rows: the panels.
        width: inches of the file.
        salt: text from which the ids of SVG elements are made.
        form: "png", "pdf" or "svg".
        keys: entries of the legend.
        options: further arguments of `Figure.savefig`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    longest = max((len(key.label) for key in keys), default=0)
    across = max(1, int(width / (_CHARACTER * longest + _LEGEND_COLUMN)))
    below = _LEGEND_ROW * -(-len(keys) // across) + 0.2 if keys else 0.0
    out, top = io.BytesIO(), sum(max(panel.height for panel in row) for row in rows) + below
    with rc_context({"svg.hashsalt": salt}, STYLE):
        drawing = Figure(figsize=(width, top))
        for row in rows:
            for place, panel in enumerate(row):
                panel.draw(axes_at(drawing, WIDTH * place, top - panel.height, panel.height))
            top -= max(panel.height for panel in row)
        if keys:
            handles, labels = [key.handle() for key in keys], [key.label for key in keys]
            drawing.legend(handles, labels, loc="lower left", ncols=across, borderaxespad=0.2)
        undated = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[form]
        drawing.savefig(out, format=form, dpi=160, metadata=undated, **options)
    return out.getvalue()


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
    furthest = sorted(group.unfinished, key=lambda run: -run.update)[:1]
    for runs, finished in ((group.finished, True), (furthest, False)):
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


def _whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only, for updates and episodes."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def _plain_labels(axis: Axis) -> None:
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
        "markeredgecolor": _PAPER,
        "markeredgewidth": 0.7,
    }


def legend(groups: Sequence[Group]) -> list[Key]:
    """Return the legend of `groups`; a single finished group needs no legend."""
    keys = [Key(each.label, look(each)["color"], each.index, each.place) for each in groups]
    if unfinished := any(group.unfinished for group in groups):
        keys.append(Key("unfinished run", _FAINT, dashed=True))
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


# The figures of a section.

_CAPTIONS = data_file("rlhf.report", "captions.yaml")
_MEANS, _INTERVALS, _OVER_KL = (_CAPTIONS[name] for name in ("means", "intervals", "metrics"))
PHASES, _ELSEWHERE = _CAPTIONS["phases"], _CAPTIONS["elsewhere"]  # phase -> label and colour
_PROGRESS = {"episode": "episodes", "examples": "examples", "update": "updates"}  # name in a row -> label
_WIDE = 30  # ratio of largest to smallest value from which a logarithmic axis is used
_SCALES = 4  # largest number of panels of one metric, one for each scale


def charts(section: Section) -> tuple[list[Chart], list[str]]:
    """Return the figures of a section, and a remark about each metric that no figure shows."""
    sampled = section.kind is Kind.rl  # the rows of other kinds describe stored responses
    groups, remarks = section.drawn, []  # type: list[Group], list[str]
    runs = [run for group in groups for run in group.runs]
    progress = next(name for name in _PROGRESS if all(name in run.rows[0] for run in runs))
    learning = [each for each in LEARNING if sampled or not each.name.startswith("objective/")]
    axes = [(each, progress, _PROGRESS[progress]) for each in learning]
    optimization = [(each, "update", "updates") for each in OPTIMIZATION]
    lag = [(each, "update", "updates") for each in OFF_POLICY if sampled]
    note = _CAPTIONS["averaged"].format(points=POINTS) * (max(len(run.trained) for run in runs) > POINTS)
    said = _MEANS + _INTERVALS + _meanings(groups) + note
    losses, lags = _CAPTIONS["optimization"], _CAPTIONS["lag_and_mismatch"]
    title = "Loss, gradients, learning rate, memory"
    made = [
        _against_kl(section),
        _curves(groups, "learning_curves", "Learning curves", said, axes, remarks),
        _curves(groups, "optimization", title, _MEANS + losses + note, optimization, remarks),
        _against_time(section),
        _curves(groups, "lag_and_mismatch", "Lag and mismatch", lags + _MEANS + note, lag, remarks),
        asynchrony(section, remarks),
        time_per_phase(section),
    ]
    return [chart for chart in made if chart is not None], remarks


def _curves(
    groups: Sequence[Group],
    name: str,
    title: str,
    caption: str,
    axes: Iterable[tuple[Metric, str, str]],
    remarks: list[str],
    points: bool = False,
) -> Chart | None:
    """Return the figure of metrics, each with its x and the label of x (see `panels_of`); None: no panels."""
    panels = [panel for each in axes for panel in panels_of(groups, *each, remarks, points)]
    return Chart(name, title, caption, panels, legend(groups)) if panels else None


def _against_kl(section: Section) -> Chart | None:
    """Return the figure of win rate, reward and judge score over the KL to the reference."""
    kl = METRICS["eval/kl"]
    groups = [group for group in section.drawn if _has(group, kl.name)]
    metrics = [METRICS[name] for name in _OVER_KL if any(_has(group, name) for group in groups)]
    if not metrics:
        return None
    name, axes = "win_rate_against_kl", [(metric, kl.name, kl.title) for metric in metrics]
    said = _CAPTIONS[name] + _meanings(groups)
    return _curves(groups, name, f"{_topic(metrics[0])} vs. KL", said, axes, [], points=True)


def _against_time(section: Section) -> Chart | None:
    """Return the figure of the main metric over the time of training."""
    main = section.main
    timed = [group for group in section.drawn if _has(group, "time/update_s")]
    if main is None or not main.evaluated or not timed:
        return None
    longest = max(run.seconds() for group in timed for run in group.runs)
    unit = next((unit for unit, size in UNITS.items() if longest > 2 * size), "seconds")
    hardware = "hardware_virtual" if any(_has(group, "virtual_s") for group in timed) else "hardware"
    name = "win_rate_against_time"
    said = _CAPTIONS[name].format(metric=main.name) + _MEANS + _INTERVALS + _CAPTIONS[hardware]
    axes = [(main, unit, f"time of training ({unit})"), (main, "virtual_s", "virtual time (seconds)")]
    return _curves(timed, name, f"{_topic(main)} vs. time", said, axes, [])


def time_per_phase(section: Section) -> Chart | None:
    """Return the figure of the seconds of an update by phase."""
    groups = [group for group in section.drawn if any(run.seconds() for run in group.measured)]
    if not groups:
        return None
    used = {**_ELSEWHERE, **PHASES}
    times = [times_of(group) for group in groups]

    def stack(axes: Axes, at: float, height: float, parts: Mapping[str, float]) -> float:
        ends, colours = [0.0, *accumulate(parts.values())], [used[phase][1] for phase in parts]
        axes.barh([at] * len(parts), [*parts.values()], height, left=ends[:-1], color=colours)
        return ends[-1]

    def draw(axes: Axes) -> None:
        beside: dict[str, Any] = {"textcoords": "offset points"}
        for row, (group, (thick, thin)) in enumerate(zip(groups, times, strict=True)):
            total = stack(axes, row, 0.34, thick)
            axes.annotate(f"{total:.3g} s", (total, row), (4, 0), verticalalignment="center", **beside)
            stack(axes, row + 0.27, 0.12, thin)
            if len(groups) > 1:
                axes.annotate(group.label, (0, row - 0.2), (0, 2), color=_INK, fontsize=8.5, **beside)
        axes.set(xlabel="seconds per update (mean)", ylim=(len(groups) - 0.5, -0.6))
        axes.margins(x=0.14)
        _plain_labels(axes.xaxis)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)

    said = _CAPTIONS["parallel" if any(thin for _, thin in times) else "synchronous"]
    return Chart(
        "time_per_phase",
        "Time per update by phase",
        _CAPTIONS["time_per_phase"] + said,
        [Panel(draw, height=0.9 + 0.55 * len(groups))],
        [Key(*used[phase]) for phase in used if any(phase in {**thick, **thin} for thick, thin in times)],
    )


def times_of(group: Group) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds per update by phase: phases of the trainer, and work in parallel with the trainer.

    The seconds are means over the runs that have updates. In a synchronous run, and in virtual time, the
    trainer waits for the sampling, so the sampling is a phase of the trainer.
    """
    runs = [run for run in group.measured if run.trained]
    means = {
        phase: sum(run.seconds(phase) / run.trained[-1]["update"] for run in runs) / max(1, len(runs))
        for phase in (*PHASES, *_ELSEWHERE)
    }
    thick, thin = ({phase: means[phase] for phase in phases} for phases in (PHASES, _ELSEWHERE))
    if group.config.get("schedule.max_lag", 0) == 0 or group.config.get("clock.name") == "virtual":
        for phase in reversed(_ELSEWHERE):
            inside = min(thin.pop(phase), thick["wait"])
            thick = {phase: inside, **thick, "wait": thick["wait"] - inside}
    least = 0.001 * sum(thick.values())
    shown = [{phase: took for phase, took in each.items() if took > least} for each in (thick, thin)]
    return shown[0], shown[1]


def panels_of(
    groups: Sequence[Group], metric: Metric, x: str, unit: str, remarks: list[str], points: bool = False
) -> Iterator[Panel]:
    """Yield the panels of one metric: one for each scale of the metric (`by_scale`), at most `_SCALES`.

    Args:
        groups: the groups to draw; groups without the metric or without x are left out.
        metric: the metric of the y axis.
        x: the column of `Run.frame` of the x axis.
        unit: label of the x axis.
        remarks: gets a remark if the metric or one of its scales is not drawn.
        points: draw the last evaluation of each group as a large point, and no bands.
    """
    measured = [group for group in groups if _has(group, metric.name) and _has(group, x)]
    for place, (label, members) in enumerate(by_scale(measured, metric.scale)):
        name = f"{metric.name} of {label}" if label else metric.name
        if place >= _SCALES:
            remarks.append(name)
        elif all(_quiet(group, metric) for group in members):
            remarks.append(f"{name} (always {metric.expected:g})")
        elif all(len(table) < 2 for group in members for table, _ in lines(group, x, metric)):
            known = ((group.label, group.value(metric)) for group in members)
            values = ", ".join(f"{name} {metric.text(value)}" for name, value in known if value is not None)
            remarks += [f"{metric.name} (a single value: {values})"] if values else []
        else:
            title = f"{metric.title}\n{label}" if label else metric.title
            yield Panel(partial(_draw_metric, members, metric, x, unit, title, points))


def _draw_metric(
    groups: Sequence[Group], metric: Metric, x: str, unit: str, title: str, points: bool, axes: Axes
) -> None:
    """Draw the panel of a metric on `axes`; the other arguments are those of `panels_of`."""
    for group in groups:
        for table, finished in lines(group, x, metric):
            trace(axes, group, table, finished, band=not points)
            if points and finished:  # a large point with its ranges in x and y
                last, style = table.iloc[-1], look(group)
                bar = {"color": style["color"], "gid": style["gid"], "linewidth": 1.2}
                axes.plot([last.x_low, last.x_high], [last.y, last.y], **bar)
                axes.plot([last.x, last.x], [last.low, last.high], **bar)
                axes.plot([last.x], [last.y], **{**style, "markersize": 9})
    axes.set(xlabel=unit, title=title)
    low, high = axes.dataLim.intervaly
    if metric.logarithmic and low > 0 and high > _WIDE * low:
        axes.set_yscale("log")
    else:  # tiny differences do not look like changes
        (low, high), least = axes.get_ylim(), 10.0**-metric.decimals
        if high - low < least:
            axes.set_ylim((high + low) / 2 - least / 2, (high + low) / 2 + least / 2)
    if metric.rate:  # from 0 to 1, with a margin
        low, high = axes.get_ylim()
        margin = 0.04 * (high - low)
        axes.set_ylim(max(low, -margin), min(high, 1 + margin))
    if unit in _PROGRESS.values():
        _whole_numbers(axes.xaxis)
    _plain_labels(axes.xaxis)
    _plain_labels(axes.yaxis)


def _has(group: Group, name: str) -> bool:
    """Return whether a row of the group has the metric `name`."""
    return any(name in run.frame for run in group.runs)


def _quiet(group: Group, metric: Metric) -> bool:
    """Return whether every value of the metric is its expected value, apart from rounding noise."""
    values = (row[metric.name] for run in group.runs for row in run.rows if metric.name in row)
    return metric.noise > 0 and all(abs(value - metric.expected) <= metric.noise for value in values)


def _meanings(groups: Sequence[Group]) -> str:
    """Return the sentences of `_OVER_KL` about the metrics that a group has."""
    return "".join(text for name, text in _OVER_KL.items() if any(_has(group, name) for group in groups))


def _topic(metric: Metric) -> str:
    """Return the metric in headings "<metric> vs. KL" and "<metric> vs. time"."""
    return capital(metric.heading.partition(" vs. ")[0])


def run_figures(folder: Path) -> dict[str, bytes]:
    """Return the figures of a run whose updates are complete: name -> PNG file.

    The result is empty if matplotlib is not installed, or if the files of the run cannot be read.

    Args:
        folder: the run folder; its trainer_state.json does not have to be marked as finished.
    """
    if find_spec("matplotlib") is None:
        return {}
    try:
        run = load(folder)
    except ValueError as error:
        log.warning(f"the dashboards get no figures of {folder}: {error}")
        return {}
    made = sections([replace(run, state={**run.state, "finished": True})])
    return {chart.name: chart.image("png") for section in made for chart in charts(section)[0]}


# The figure of groups.jsonl: slots and trainer over time, ages of groups, and which lengths are trained.


_UPDATES = 6  # updates of a timeline: with those before the first and after the last, seven versions
_SLOTS = 32  # largest number of slots of a timeline
_TIMELINES = 4  # largest number of timelines
_PITCH = 0.1  # inches from one slot to the next
_GREY = 6  # index in SERIES; grey is the colour of discarded groups
_COLOURS = SERIES[:_GREY] + SERIES[_GREY + 1 :]  # of versions

_Rows = list[dict[str, Any]]  # rows of groups.jsonl


class Response(NamedTuple):
    """A response in its slot: times of start and end, and whether it was not trained, or cut."""

    start: float
    end: float
    dropped: bool
    cut: bool


def asynchrony(section: Section, remarks: list[str]) -> Chart | None:
    """Return the figure of the runs in virtual time; `remarks` gets one about each file that is damaged."""
    found: dict[Group, list[tuple[Run, _Rows]]] = {}
    for group in section.drawn:
        for run in group.measured:
            try:
                rows = run.groups() if "virtual_s" in run.frame else []
                if any("loaded" in row for row in rows):
                    found.setdefault(group, []).append((run, rows))
            except ValueError as error:
                remarks.append(f"groups of {run.folder.name} ({error})")
    every = {group: [row for _, rows in runs for row in rows] for group, runs in found.items()}
    timelines = [
        _timeline(*runs[0], group.label if len(section.groups) > 1 else "timeline")
        for group, runs in list(found.items())[:_TIMELINES]
    ]
    panels, caption = [*timelines, Panel(partial(_draw_ages, every))], _CAPTIONS["asynchrony"]
    if any(row["fate"] in ("cut", "dropped") for rows in every.values() for row in rows):
        panels, caption = [*panels, Panel(partial(_draw_deciles, every))], caption + _CAPTIONS["durations"]
    return Chart("asynchrony", "Asynchrony", caption, panels, legend(list(every))) if found else None


def in_slots(responses: Iterable[Response], count: int) -> list[list[Response]]:
    """Return the responses of each slot; a response gets the slot that has been free for the longest time.

    Args:
        responses: responses in any order.
        count: number of slots; more are added if more responses overlap.
    """
    slots: list[list[Response]] = [[] for _ in range(count)]
    for response in sorted(responses):
        free = min(slots, key=lambda slot: slot[-1].end if slot else -inf, default=None)
        if free is None or (free and free[-1].end > response.start):
            slots.append(free := [])
        free.append(response)
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
    bars = []  # y, begin, end and colour of the parts of responses that different versions sampled
    for y, response in placed:
        version = bisect_right(loads, response.start)
        swaps = loads[version : bisect_left(loads, response.end)]
        parts = swaps if run.config.get("schedule.update") == "in_flight" else []
        for of, piece in enumerate(pairwise([response.start, *parts, response.end]), version):
            bars.append((y, *piece, _FAINT if response.dropped else _COLOURS[of % len(_COLOURS)]))
    trainer = [
        (-2.5, taken, loaded - run.config.get("clock.sync_s", 0.0), _COLOURS[version % len(_COLOURS)])
        for version, (loaded, taken) in enumerate(updates[first : first + _UPDATES], first + 1)
    ]
    work = sum(min(right, end) - max(left, begin) for _, left, right, _ in trainer)

    def draw(axes: Axes) -> None:
        axes.vlines(loads[max(0, first - 1) : first + _UPDATES], -3.5, len(shown), _RULE, linewidth=0.8)
        axes.hlines(*zip(*bars, *trainer, strict=True), linewidth=72 * _PITCH * 0.8)
        ends = [
            (each.end, y - 0.45, y + 0.45, _INK if each.cut else _PAPER, 1.6 if each.cut else 0.8)
            for y, each in placed
        ]
        *at, widths = zip(*ends, strict=True)
        axes.vlines(*at, linewidth=widths)
        axes.set(xlim=(begin, end), ylim=(len(shown), -3.5), xlabel="virtual time (seconds)", title=title)
        axes.set_yticks([-2.5, (len(shown) - 1) / 2], ["trainer", "slots"])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        _plain_labels(axes.xaxis)

    title = f"{label}\ntrainer works {100 * work / (end - begin):.0f} % of this time"
    return Panel(draw, 1.0 + _PITCH * (len(shown) + 4))


def _draw_ages(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the distribution of the ages of the trained groups."""
    for group, own in rows.items():
        ages = [row["update"] - 1 - row["version"] for row in own if "loaded" in row]
        shares, edges = np.histogram(ages, np.arange(max(ages) + 2) - 0.5, density=True)
        style = {key: look(group)[key] for key in ("color", "gid")}
        axes.stairs(shares, edges, fill=len(rows) == 1, linewidth=1.8, **style)
    axes.set(title="ages of trained groups", xlabel="age (updates)", ylabel="share")
    _whole_numbers(axes.xaxis)


def _draw_deciles(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the share of groups that are trained whole, by decile of the duration of all groups."""
    for group, own in rows.items():
        own = [row for row in own if row["fate"] != "replaced"]  # they were decoded whole
        ordered = sorted(own, key=lambda row: (sum(row["ends"]) - sum(row["starts"])) / len(row["ends"]))
        deciles = np.array_split([row["fate"] == "trained" for row in ordered], 10)
        points = [(decile, whole.mean()) for decile, whole in enumerate(deciles, 1) if len(whole)]
        axes.plot(*zip(*points, strict=True), **look(group))
    axes.set(title="groups that are trained whole", xlabel="decile of duration", ylabel="share")
    axes.set_ylim(-0.04, 1.04)
    axes.set_xticks(range(1, 11))
