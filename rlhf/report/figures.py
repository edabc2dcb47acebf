"""Figures of a section: results vs. KL and vs. time, learning curves, optimization, lag, time per phase."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappush, heapreplace
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf.report import drawing
from rlhf.report.drawing import FAINT, INK, PAPER, POINTS, RULE, SERIES, Chart, Key, Panel
from rlhf.report.groups import by_scale, sections
from rlhf.report.runs import LEARNING, METRICS, OFF_POLICY, OPTIMIZATION, UNITS, Kind, Metric, load
from rlhf.report.tables import capital

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import Run

log = logging.getLogger(__name__)

# Phases of the trainer: phase -> label and colour (Paul Tol's "bright" palette). The phases and their order
# are those of `rlhf.training.recorder.PHASES`.
PHASES = {
    "wait": ("waiting for samples", "#bbbbbb"),
    "score": ("scoring", "#ccbb44"),
    "annotate": ("log-probs and values", "#66ccee"),
    "train": ("training", "#4477aa"),
    "sync": ("weight transfer", "#ee6677"),
}

# Work that may run in another process, in parallel with the trainer: phase -> label and colour.
_ELSEWHERE = {
    "generate": ("sampling", "#aa3377"),
    "annotate_ahead": ("scores and log-probs computed ahead", "#228833"),
}

# Metrics of the figure over the KL, in the order of the panels, and what they mean.
_OVER_KL = {
    "eval/win_rate": "Win rate: share of held-out prompts for which the judge scores the near-greedy "
    "response strictly higher than the reference response (eval/win_rate). ",
    "eval/win_rate_vs_initial": "Win rate vs. initial policy: share of held-out prompts whose reward is "
    "higher than before training (eval/win_rate_vs_initial). ",
    "eval/accuracy": "Accuracy: share of held-out prompts with a correct answer, or of held-out pairs with "
    "the higher reward for the chosen response (eval/accuracy). ",
    "eval/score": "Reward: mean of the training scorer (eval/score on held-out prompts, objective/scores "
    "on training samples). ",
    "eval/gold_score": "Judge score: mean score by the judge, which training does not use "
    "(eval/gold_score). ",
}

_PROGRESS = {"episode": "episodes", "examples": "examples", "update": "updates"}  # name in a row -> label
_WIDE = 30  # ratio of largest to smallest value from which a logarithmic axis is used
_SCALES = 4  # largest number of panels of one metric, one for each scale

_MEANS = "Lines are means over seeds, and bands are the range over seeds. "
_SCALED = (
    f"{_MEANS}All values are those of training rows. Losses and margins of different algorithms have "
    "different scales, so each algorithm has its own axes."
)
_LAG = (
    "Lag is the version being trained minus the version that sampled the batch. Mismatch compares the "
    "log-probs of the sampled tokens by the trainer, just before the update, with those by the sampler "
    "(mismatch/kl, mismatch/max_ratio). The effective sample size of the weights trainer / sampler of "
    f"responses is 1 on-policy (mismatch/ess). {_MEANS}"
)
_INTERVALS = "With a single seed, the band is the 95 % confidence interval, where the run reports one. "


def charts(section: Section) -> tuple[list[Chart], list[str]]:
    """Return the figures of a section, and a remark about each metric that no figure shows."""
    sampled = section.kind is Kind.rl  # the rows of other kinds describe stored responses
    runs = [run for group in section.drawn for run in group.runs]
    progress = next(name for name in _PROGRESS if all(name in run.rows[0] for run in runs))
    learning = [each for each in LEARNING if sampled or not each.name.startswith("objective/")]
    said = _MEANS + _INTERVALS + _meanings(section.drawn)
    made = [
        _against_kl(section),
        _curves(section, "learning_curves", "Learning curves", said, learning, progress),
        _curves(section, "optimization", "Loss, gradients, learning rate, memory", _SCALED, OPTIMIZATION),
        _against_time(section),
        _curves(section, "lag_and_mismatch", "Lag and mismatch", _LAG, OFF_POLICY if sampled else ()),
        asynchrony(section),
        (time_per_phase(section), []),
    ]
    drawn = [chart for chart, _ in made if chart is not None]
    return drawn, [remark for _, remarks in made for remark in remarks]


_Made = tuple[Chart | None, list[str]]  # a figure, None without data, and remarks about metrics not drawn


def _against_kl(section: Section) -> _Made:
    """Return the figure of win rate, reward and judge score over the KL to the reference."""
    groups = [group for group in section.drawn if _has(group, "eval/kl")]
    metrics = [METRICS[name] for name in _OVER_KL if any(_has(group, name) for group in groups)]
    if not metrics:
        return None, []
    unit = METRICS["eval/kl"].title
    made = [panels_of(groups, metric, "eval/kl", unit, points=True) for metric in metrics]
    chart = Chart(
        "win_rate_against_kl",
        f"{_topic(metrics[0])} vs. KL",
        "Each point is an evaluation; lines join the evaluations in the order of training. The large point "
        "is the last evaluation, and its bars are the range over seeds, or the 95 % confidence interval of a "
        "single seed. The KL is estimated on samples at the training temperature (eval/kl). A higher value "
        "at the same KL is better. " + _meanings(groups),
        [panel for panels, _ in made for panel in panels],
        drawing.legend(groups),
    )
    return chart if chart.panels else None, []


def _curves(
    section: Section,
    name: str,
    title: str,
    caption: str,
    metrics: Sequence[Metric],
    x: str = "update",
) -> _Made:
    """Return the figure of metrics over x, a name of `_PROGRESS`; without panels, there is no figure."""
    groups = section.drawn
    made = [panels_of(groups, metric, x, _PROGRESS[x]) for metric in metrics]
    panels = [panel for shown, _ in made for panel in shown]
    longest = max((len(run.trained) for group in groups for run in group.runs), default=0)
    note = f" Curves of more than {POINTS} updates are averaged over neighbouring updates."
    chart = Chart(name, title, caption + note * (longest > POINTS), panels, drawing.legend(groups))
    return chart if panels else None, [remark for _, skipped in made for remark in skipped]


def _against_time(section: Section) -> _Made:
    """Return the figure of the main metric over the time of training."""
    main = section.main
    timed = [group for group in section.drawn if _has(group, "time/update_s")]
    if main is None or not main.evaluated or not timed:
        return None, []
    longest = max(run.seconds() for group in timed for run in group.runs)
    unit = next((unit for unit, size in UNITS.items() if longest > 2 * size), "seconds")
    panels, _ = panels_of(timed, main, unit, f"time of training ({unit})")
    if not panels:
        return None, []
    virtual = [group for group in timed if _has(group, "rollouts/time_s")]
    panels += panels_of(virtual, main, "virtual_s", "virtual time (seconds)")[0]
    chart = Chart(
        "win_rate_against_time",
        f"{_topic(main)} vs. time",
        f"Each point is an evaluation ({main.name}) over the total time of the updates before it: waiting, "
        "scoring, log-probs, training and weight transfer (time/update_s), without loading, evaluation and "
        f"checkpoints. {_MEANS}{_INTERVALS}Times are comparable only on the same hardware without other load"
        + (", virtual times (rollouts/time_s) on all machines." if virtual else "."),
        panels,
        drawing.legend(timed),
    )
    return chart, []


def time_per_phase(section: Section) -> Chart | None:
    """Return the figure of the seconds of an update by phase."""
    groups = [group for group in section.drawn if any(run.seconds() for run in group.measured)]
    if not groups:
        return None
    used = {**_ELSEWHERE, **PHASES}
    times = [times_of(group) for group in groups]

    def stack(axes: Axes, at: float, height: float, parts: Mapping[str, float]) -> float:
        left = 0.0
        for phase, took in parts.items():
            axes.barh(at, took, height, left=left, color=used[phase][1])
            left += took
        return left

    def draw(axes: Axes) -> None:
        beside: dict[str, Any] = {"textcoords": "offset points"}
        for row, (group, (thick, thin)) in enumerate(zip(groups, times, strict=True)):
            total = stack(axes, row, 0.34, thick)
            axes.annotate(f"{total:.3g} s", (total, row), (4, 0), verticalalignment="center", **beside)
            stack(axes, row + 0.27, 0.12, thin)
            if len(groups) > 1:
                axes.annotate(group.label, (0, row - 0.2), (0, 2), color=INK, fontsize=8.5, **beside)
        axes.set(xlabel="seconds per update (mean)", ylim=(len(groups) - 0.5, -0.6))
        axes.margins(x=0.14)
        drawing.plain_labels(axes.xaxis)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)

    parallel = any(thin for _, thin in times)
    return Chart(
        "time_per_phase",
        "Time per update by phase",
        "Thick bar: phases of the trainer, one after the other (time/..._s divided by the number of updates; "
        "means over seeds). "
        + (
            "Thin bar: sampling, and scores and log-probs computed ahead, in other processes and in parallel "
            "with the thick bar."
            if parallel
            else "The trainer waits while the responses are sampled, so sampling is a phase of the thick bar."
        ),
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
    groups: Sequence[Group], metric: Metric, x: str, unit: str, points: bool = False
) -> tuple[list[Panel], list[str]]:
    """Return the panels of one metric: one for each scale of the metric (`by_scale`), at most `_SCALES`.

    Args:
        groups: the groups to draw; groups without the metric are left out.
        metric: the metric of the y axis.
        x: the column of `Run.frame` of the x axis.
        unit: label of the x axis.
        points: draw the last evaluation of each group as a large point, and no bands.

    Returns:
        The panels, and a remark if the metric or one of its scales is not drawn.
    """
    measured = [group for group in groups if _has(group, metric.name)]
    if not measured:
        return [], []
    if all(_quiet(group, metric) for group in measured):
        return [], [f"{metric.name} (always {metric.expected:g})"]
    scales = by_scale(measured, metric.scale)
    remarks = [f"{metric.name} of {label}" for label, _ in scales[_SCALES:]]
    panels = []
    for label, members in scales[:_SCALES]:
        if all(_quiet(group, metric) for group in members):
            remarks.append(f"{metric.name} of {label} (always {metric.expected:g})")
            continue
        if all(len(curve) < 2 for group in members for curve, _ in drawing.lines(group, x, metric)):
            known = ((group.label, group.value(metric)) for group in members)
            values = ", ".join(f"{name} {metric.text(value)}" for name, value in known if value is not None)
            remarks += [f"{metric.name} (a single value: {values})"] if values else []
            continue
        title = f"{metric.title}\n{label}" if label else metric.title
        panels.append(Panel(partial(_draw_metric, members, metric, x, unit, title, points)))
    return panels, remarks


def _draw_metric(
    groups: Sequence[Group], metric: Metric, x: str, unit: str, title: str, points: bool, axes: Axes
) -> None:
    """Draw the panel of a metric on `axes`; the other arguments are those of `panels_of`."""
    for group in groups:
        for curve, finished in drawing.lines(group, x, metric):
            drawing.trace(axes, group, curve, finished, band=not points)
            if points and finished:  # a large point with its ranges in x and y
                last, style = curve.iloc[-1], drawing.look(group)
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
        drawing.whole_numbers(axes.xaxis)
    drawing.plain_labels(axes.xaxis)
    drawing.plain_labels(axes.yaxis)


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
    finished = replace(run, state={**run.state, "finished": True})
    return {
        chart.name: chart.image("png") for section in sections([finished]) for chart in charts(section)[0]
    }


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
    panels, caption = [*timelines, Panel(partial(_draw_ages, every))], _CAPTION
    if any(row["fate"] in ("cut", "dropped") for rows in every.values() for row in rows):
        panels, caption = [*panels, Panel(partial(_draw_deciles, every))], caption + _DURATION
    chart = Chart("asynchrony", "Asynchrony", caption, panels, drawing.legend(list(every)))
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
    bars = []  # y, begin, end and colour of the parts of responses that different versions sampled
    for y, response in placed:
        version = bisect_right(loads, response.start)
        swaps = loads[version : bisect_left(loads, response.end)]
        parts = swaps if run.config.get("schedule.update") == "in_flight" else []
        for piece in pairwise([response.start, *parts, response.end]):
            bars.append((y, *piece, FAINT if response.dropped else _COLOURS[version % len(_COLOURS)]))
            version += 1
    trainer = [
        (-2.5, taken, loaded - run.config.get("clock.sync_s", 0.0), _COLOURS[version % len(_COLOURS)])
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
        drawing.plain_labels(axes.xaxis)

    title = f"{label}\ntrainer works {100 * work / (end - begin):.0f} % of this time"
    return Panel(draw, 1.0 + _PITCH * (len(shown) + 4))


def _draw_ages(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the distribution of the ages of the trained groups."""
    for group, own in rows.items():
        ages = [row["update"] - 1 - row["version"] for row in own if "loaded" in row]
        shares, edges = np.histogram(ages, np.arange(max(ages) + 2) - 0.5, density=True)
        style = {key: drawing.look(group)[key] for key in ("color", "gid")}
        axes.stairs(shares, edges, fill=len(rows) == 1, linewidth=1.8, **style)
    axes.set(title="ages of trained groups", xlabel="age (updates)", ylabel="share")
    drawing.whole_numbers(axes.xaxis)


def _draw_deciles(rows: dict[Group, _Rows], axes: Axes) -> None:
    """Draw the share of groups that are trained whole, by decile of the duration of all groups."""
    for group, own in rows.items():
        own = [row for row in own if row["fate"] != "replaced"]  # they were decoded whole
        ordered = sorted(own, key=lambda row: (sum(row["ends"]) - sum(row["starts"])) / len(row["ends"]))
        deciles = np.array_split([row["fate"] == "trained" for row in ordered], 10)
        points = [(decile, whole.mean()) for decile, whole in enumerate(deciles, 1) if len(whole)]
        axes.plot(*zip(*points, strict=True), **drawing.look(group))
    axes.set(
        title="groups that are trained whole", xlabel="decile of duration", ylabel="share", ylim=(-0.04, 1.04)
    )
    axes.set_xticks(range(1, 11))
