"""The figures of a report, drawn by matplotlib: once as PNG, once as SVG whose colours the page decides."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.report.curves import POINTS, curve, figure, seconds
from rlhf.report.groups import by_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from rlhf.report.curves import Point, Read
    from rlhf.report.groups import Group


# Okabe and Ito's palette, which colour-blind people tell apart, less black and yellow; markers tell more.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5f66")


MARKERS = ("o", "s", "^", "D", "v", "P", "X")


LINES = ("-", (0, (6, 1.5)), (0, (1, 1)))  # where there are more groups than colours


# Paul Tol's "bright", by what the trainer spends its time on; `rlhf.recorder.PHASES`, in order.
PHASES = {
    "wait": ("waiting for samples", "#bbbbbb"),
    "score": ("scoring", "#ccbb44"),
    "annotate": ("log-probs and values", "#66ccee"),
    "train": ("training", "#4477aa"),
    "sync": ("handing weights over", "#ee6677"),
}


ELSEWHERE = {
    "generate": ("sampling", "#aa3377"),
    "annotate_ahead": ("scores and log-probs ahead", "#228833"),
}


INK, FAINT, RULE, PAPER = "#1b1f24", "#636b76", "#dde1e6", "#fefefe"


# Colours as the page's style sheet names them, for light and dark.
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
    "text.parse_math": False,  # a label is text, with a $ in it too
}


# What learning curves are drawn of: figure, title with unit.
LEARNING = (
    ("eval/win_rate", "gold win-rate against the reference responses"),
    ("eval/gold_score", "gold score"),
    ("objective/scores", "score that training sees"),
    ("eval/accuracy", "accuracy on held-out pairs"),
    ("eval/loss", "held-out loss (nats)"),
    ("eval/kl", "KL to the reference (nats per response)"),
    ("eval/response_tokens", "response length (tokens)"),
    ("objective/entropy", "entropy estimate (nats per response)"),
)


OFF_POLICY = (
    ("lag", "lag (updates)"),
    ("mismatch/token_lag", "lag of a token (updates)"),
    ("mismatch/kl", "KL of sampler and trainer (nats per token)"),
    ("mismatch/max_ratio", "largest ratio of trainer to sampler"),
    ("policy/clipfrac", "share of ratios that were clipped"),
)


EPISODES = (("episode", "episodes"), ("examples", "examples"), ("update", "updates"))


@dataclass(frozen=True)
class Chart:
    """A figure: what its files are called, its title, what it shows and how it is computed, the drawing."""

    name: str
    title: str
    caption: str
    drawing: Figure

    def png(self) -> bytes:
        """The figure on white, at twice the page's resolution."""
        out = io.BytesIO()
        self.drawing.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
        return out.getvalue()

    def svg(self) -> str:
        """The figure as an element of a page, in the colours and the font of its style sheet.

        What belongs to group i has the classes `series` and `series-i`.
        """
        from matplotlib import rc_context

        out = io.StringIO()
        with rc_context({**STYLE, "svg.hashsalt": self.name}):  # ids that no other figure of the page has
            self.drawing.savefig(out, format="svg", transparent=True)
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
        text = re.sub(r'id="(series-\d+)"', r'class="series \1"', text)
        named = set(re.findall(r"#([\w-]+)", text))
        text = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in named else "", text)
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        return text


def charts(groups: Sequence[Group]) -> tuple[list[Chart], list[str]]:
    """The figures that `groups` have data for, task by task, and what there is no figure of, and why."""
    from matplotlib import rc_context

    made, missing = [], []
    tasks = by_task(groups)
    with rc_context(STYLE):
        for draw in (against_kl, learning_curves, against_time, off_policyness, time_per_phase):
            for task in tasks:
                chart, name = draw(task), task[0].task
                if isinstance(chart, str):
                    missing.append(f"{name}: {chart}" if len(tasks) > 1 else chart)
                elif len(tasks) > 1:
                    made.append(replace(chart, name=f"{chart.name}_{name}", title=f"{chart.title}: {name}"))
                else:
                    made.append(chart)
    return made, missing


def against_kl(groups: Sequence[Group]) -> Chart | str:
    """What was won for how far the policy went from where it started."""
    names = {"eval/win_rate": "gold win-rate", "eval/gold_score": "gold score"}
    present = [name for name in names if has(groups, name) and has(groups, "eval/kl")]
    if not present:
        return "win-rate against KL (no run has eval/win_rate and eval/kl)"
    drawing, axes = panels(len(present), height=4.4)
    for axis, name in zip(axes, present, strict=True):
        for group in groups:
            for points, whole in lines(group, figure("eval/kl"), figure(name)):
                trace(axis, group, points, whole, band=False)
                if whole:
                    crosshair(axis, group, points[-1])
        axis.set(xlabel="KL to the reference (nats per response)", ylabel=names[name])
        widen(axis, name)
    legend(drawing, groups)
    return Chart(
        "win_rate_against_kl",
        "What is won, against KL",
        "Each evaluation is a point, joined in the order of training; the large one is the last, "
        "with the range over seeds as bars. Both axes are means over seeds. Win-rate is the share of "
        "held-out prompts whose near-greedy response the gold judge scores strictly higher than the "
        "reference response (eval/win_rate), gold score the judge's mean score (eval/gold_score); KL "
        "is estimated on samples at the temperature of training (eval/kl). Higher at the same KL is better.",
        drawing,
    )


def learning_curves(groups: Sequence[Group]) -> Chart | str:
    """Figures over episodes."""
    present = [(name, title) for name, title in LEARNING if has(groups, name)]
    if not present:
        return "learning curves (no run has a row of them yet)"
    x, unit = progress_axis(groups)
    drawing, axes = panels(len(present))
    for axis, (name, title) in zip(axes, present, strict=True):
        draw_all(axis, groups, figure(x), figure(name))
        axis.set(xlabel=unit, title=title)
        whole_numbers(axis.xaxis)
        widen(axis, name)
    legend(drawing, groups)
    return Chart(
        "learning_curves",
        "Learning curves",
        "Lines are means over seeds, bands reach from the least to the largest seed. Gold, KL, length and "
        "held-out figures are measured on held-out prompts, scores and entropy on the samples trained on "
        f"(the rows of metrics.jsonl, by {x}).{blocks(groups)}",
        drawing,
    )


def against_time(groups: Sequence[Group]) -> Chart | str:
    """Win-rate over the seconds that training took."""
    name = next((name for name in ("eval/win_rate", "eval/accuracy", "eval/loss") if has(groups, name)), None)
    if name is None or not has(groups, "time/update_s"):
        return "win-rate against wall-clock (no run has evaluations and times)"
    longest = max(run.seconds() for group in groups for run in group.runs)
    scale, unit = next(
        (s, u) for s, u in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest > 2 * s or s == 1
    )
    drawing, axes = panels(1, height=4.2)

    def clock(run: Any, row: Any) -> float | None:
        took = seconds(run, row)
        return None if took is None else took / scale

    draw_all(axes[0], groups, clock, figure(name))
    axes[0].set(xlabel=f"wall-clock time of training ({unit})", ylabel=dict(LEARNING)[name], xlim=(0, None))
    widen(axes[0], name)
    legend(drawing, groups)
    return Chart(
        "win_rate_against_time",
        "What is won, against wall-clock",
        f"The evaluations ({name}) over the time of all updates before them: the sum of time/update_s, that "
        "is waiting, scoring, log-probs, training and handing weights over, without loading, evaluation and "
        "checkpoints. Means over seeds on both axes, bands from the least to the largest. Times compare only "
        "between runs on the same hardware with nothing else on it.",
        drawing,
    )


def off_policyness(groups: Sequence[Group]) -> Chart | str:
    """How old samples are, and how far sampler and trainer are apart."""
    known = [(name, title) for name, title in OFF_POLICY if has(groups, name)]
    present = [(name, title) for name, title in known if has(groups, name, other_than=0.0)]
    if not present:
        why = "all are 0 in every run" if known else "the runs train on stored completions"
        return f"lag and mismatch ({why})"
    zero = ", ".join(name for name, title in known if (name, title) not in present)
    drawing, axes = panels(len(present), height=2.7)
    for axis, (name, title) in zip(axes, present, strict=True):
        draw_all(axis, groups, figure("update"), figure(name), only="lr")
        axis.set(xlabel="updates", title=title)
        whole_numbers(axis.xaxis)
        if name == "lag":
            whole_numbers(axis.yaxis)
        whole_labels(axis)
    legend(drawing, groups)
    return Chart(
        "lag_and_mismatch",
        "Lag and mismatch",
        "Lag is the version being trained minus the version that sampled the batch. Mismatch "
        "compares log-probs of the sampled tokens: the trainer's just before the update against the "
        "sampler's (mismatch/kl, mismatch/max_ratio). Means over seeds with their range."
        + (f" Not drawn, being 0 throughout: {zero}." if zero else "")
        + blocks(groups),
        drawing,
    )


def time_per_phase(groups: Sequence[Group]) -> Chart | str:
    """Where the seconds of an update go."""
    from matplotlib.patches import Patch

    timed = [group for group in groups if any(run.trained for run in group.measured)]
    if not timed or not has(groups, "time/update_s"):
        return "time per phase (no run has times)"
    drawing, (axis,) = panels(1, height=1.3 + 0.62 * len(timed))
    for row, group in enumerate(timed):
        left = 0.0
        for phase, (_, colour) in PHASES.items():
            left += bar(axis, row - 0.14, 0.36, left, per_update(group, phase), colour)
        total = axis.annotate(f"{left:.3g} s", (left, row - 0.14), (5, 0), textcoords="offset points")
        total.set_verticalalignment("center")
        beside = 0.0
        for phase, (_, colour) in ELSEWHERE.items():
            beside += bar(axis, row + 0.2, 0.16, beside, per_update(group, phase), colour)
    axis.set(xlabel="seconds per update (mean)", ylim=(len(timed) - 0.5, -0.6))
    axis.margins(x=0.12)
    axis.set_yticks(range(len(timed)), [wrapped(group.label) for group in timed])
    axis.tick_params(axis="y", length=0, labelcolor=INK)
    axis.grid(axis="y", visible=False)
    used = {**PHASES, **ELSEWHERE}
    phases = [phase for phase in used if any(per_update(group, phase) for group in timed)]
    handles = [Patch(color=used[phase][1]) for phase in phases]
    drawing.legend(handles, [used[phase][0] for phase in phases], loc="outside upper left", ncols=4)
    return Chart(
        "time_per_phase",
        "Where an update's time goes",
        "Thick bar: what the trainer does, phase after phase, together an update (time/wait_s, score_s, "
        "annotate_s, train_s, sync_s by the number of updates; means over seeds). Thin bar: "
        "sampling, and scores and log-probs computed ahead (time/generate_s, time/annotate_ahead_s) of a "
        "batch, one after the other, "
        "wherever they ran. Without a process of its own the generator's time is part of the "
        "waiting; with one, both bars go on at the same time.",
        drawing,
    )


def has(groups: Sequence[Group], name: str, other_than: float | None = None) -> bool:
    """Whether any run has the figure `name`, with a value `other_than` the given one."""
    rows = (row for group in groups for run in group.runs for row in run.rows)
    return any(name in row and row[name] != other_than for row in rows)


def progress_axis(groups: Sequence[Group]) -> tuple[str, str]:
    """What all runs count their progress in: the figure's name, and its unit."""
    runs = [run for group in groups for run in group.runs if run.rows]
    return next((name, unit) for name, unit in EPISODES if all(name in run.rows[0] for run in runs))


def blocks(groups: Sequence[Group]) -> str:
    """A sentence on points that stand for several updates, where there are such."""
    longest = max(len(run.trained) for group in groups for run in group.runs)
    return f" Above {POINTS} updates a point is the mean of neighbouring ones." if longest > POINTS else ""


def panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of `height` inches, two in a row."""
    from matplotlib.figure import Figure

    columns = min(count, 2)
    rows = -(-count // columns)
    drawing = Figure(figsize=(9.6, height * rows + 0.4))
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return drawing, axes[:count]


def lines(group: Group, x: Read, y: Read) -> Iterator[tuple[list[Point], bool]]:
    """The curve over the finished runs (whole), and one for each unfinished run."""
    if points := curve(group.finished, x, y):
        yield points, True
    for run in group.unfinished:
        if points := curve([run], x, y):
            yield points, False


def draw_all(axis: Axes, groups: Sequence[Group], x: Read, y: Read, only: str | None = None) -> None:
    """Draw the curves of all groups; `only` rows that have that figure."""
    read: Read = (lambda run, row: y(run, row) if only in row else None) if only else y
    for group in groups:
        for points, whole in lines(group, x, read):
            trace(axis, group, points, whole, band=len(group.finished) > 1)


def trace(axis: Axes, group: Group, points: list[Point], whole: bool, band: bool) -> None:
    """Draw a curve, with a band of its range; one that is not whole is thin and ends in a cross."""
    look = style(group)
    if not whole:
        look |= {"linestyle": (0, (2, 2)), "linewidth": 1.0, "marker": ""}
    elif len(points) > 25:
        look["marker"] = ""
    xs, ys = [point.x for point in points], [point.y for point in points]
    axis.plot(xs, ys, gid=mark(group), **look)
    if not whole:
        axis.plot(
            xs[-1:],
            ys[-1:],
            gid=mark(group),
            **{**look, "marker": "x", "markersize": 6, "markeredgecolor": look["color"]},
        )
    if band and whole:
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
    """The last point, large, with its ranges."""
    look = style(group)
    gid = mark(group)
    axis.plot([point.x_low, point.x_high], [point.y, point.y], color=look["color"], linewidth=1.2, gid=gid)
    axis.plot([point.x, point.x], [point.low, point.high], color=look["color"], linewidth=1.2, gid=gid)
    axis.plot([point.x], [point.y], gid=gid, **{**look, "markersize": 10})


def widen(axis: Axes, name: str) -> None:
    """Show all of a rate that does not change, instead of its last digits."""
    low, high = axis.dataLim.intervaly
    if name in ("eval/win_rate", "eval/accuracy") and high - low < 0.001:
        axis.set_ylim(-0.03, 1.03)


def whole_numbers(axis: Axis) -> None:
    """Have no ticks between two updates or episodes."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def whole_labels(axis: Axes) -> None:
    """Label a tick with all of its value, which may be very small, instead of a factor beside the title."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None) -> str:
        low, high = axis.get_ylim()
        none = abs(value) < 1e-9 * (high - low)  # but for the rounding of the ticks
        return f"{0 if none else value:.8g}".replace("-", "\N{MINUS SIGN}")

    axis.yaxis.set_major_formatter(FuncFormatter(label))


def mark(group: Group) -> str:
    """What elements that belong to a group are marked with."""
    return f"series-{group.index}"


def style(group: Group) -> dict[str, Any]:
    """Colour, marker and line of a group."""
    return {
        "color": SERIES[group.place % len(SERIES)],
        "marker": MARKERS[group.place % len(MARKERS)],
        "linestyle": LINES[group.place // len(SERIES) % len(LINES)],
        "markersize": 5.5,
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.7,
    }


def legend(drawing: Figure, groups: Sequence[Group]) -> None:
    """The groups above the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], gid=mark(group), **style(group)) for group in groups]
    labels = [wrapped(group.label) for group in groups]
    longest = max(map(len, "\n".join(labels).split("\n")))
    columns = max(1, min(len(groups), 100 // (longest + 8)))
    if any(group.unfinished for group in groups):
        handles.append(Line2D([], [], color=FAINT, linestyle=(0, (2, 2)), linewidth=1.0, marker="x"))
        labels.append("a run that is not finished")
    made = drawing.legend(handles, labels, loc="outside upper left", ncols=columns)
    for group, text in zip(groups, made.get_texts(), strict=False):
        text.set_gid(mark(group))


def wrapped(label: str) -> str:
    """A label in lines of readable length."""
    import textwrap

    return "\n".join(textwrap.wrap(label, 44, break_long_words=False, break_on_hyphens=False))


def bar(axis: Axes, at: float, height: float, left: float, width: float, colour: str) -> float:
    """Draw a piece of a stacked bar; returns its width."""
    if width:
        axis.barh(at, width, height, left=left, color=colour)
    return width


def per_update(group: Group, phase: str) -> float:
    """Seconds of `time/<phase>_s` an update, mean over the runs of `group` that have updates."""
    found = [run.seconds(phase) / run.trained[-1]["update"] for run in group.measured if run.trained]
    return sum(found) / len(found)
