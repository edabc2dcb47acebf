"""Figures of a section: results vs. KL and vs. time, learning curves, optimization, lag, time per phase."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.formatting import bounds
from rlhf.report import drawing
from rlhf.report.drawing import INK, POINTS, Chart, Key, Panel, asynchrony, figure, lines, seconds
from rlhf.report.groups import by_scale, sections
from rlhf.report.runs import LEARNING, METRICS, OFF_POLICY, OPTIMIZATION, Kind, Metric, load
from rlhf.report.tables import capital

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rlhf.core.metrics import Row
    from rlhf.report.drawing import Read
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
ELSEWHERE = {
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

MEANS = "Lines are means over seeds, and bands are the range over seeds. "
_INTERVALS = "With a single seed, the band is the 95 % confidence interval, where the run reports one. "


def charts(section: Section) -> tuple[list[Chart], list[str]]:
    """Return the figures of a section, and a remark about each metric that no figure shows."""
    makers = (
        _against_kl,
        _learning_curves,
        _optimization,
        _against_time,
        _off_policyness,
        asynchrony,
        time_per_phase,
    )
    made = [make(section) for make in makers]
    drawn = [chart for chart, _ in made if chart is not None]
    return drawn, [remark for _, remarks in made for remark in remarks]


_Made = tuple[Chart | None, list[str]]  # a figure, None without data, and remarks about metrics not drawn


def _against_kl(section: Section) -> _Made:
    """Return the figure of win rate, reward and judge score over the KL to the reference."""
    groups = [group for group in section.drawn if has(group, "eval/kl")]
    metrics = [METRICS[name] for name in _OVER_KL if any(has(group, name) for group in groups)]
    if not metrics:
        return None, []
    x, unit = figure("eval/kl"), METRICS["eval/kl"].title
    made = [panels_of(groups, metric, x, unit, points=True) for metric in metrics]
    chart = Chart(
        "win_rate_against_kl",
        f"{topic(metrics[0])} vs. KL",
        "Each point is an evaluation; lines join the evaluations in the order of training. The large point "
        "is the last evaluation, and its bars are the range over seeds, or the 95 % confidence interval of a "
        "single seed. The KL is estimated on samples at the training temperature (eval/kl). A higher value "
        "at the same KL is better. " + _meanings(groups),
        [panel for panels, _ in made for panel in panels],
        drawing.legend(groups),
    )
    return chart if chart.panels else None, []


def _learning_curves(section: Section) -> _Made:
    """Return the figure of held-out metrics and training reward over the progress of training."""
    sampled = section.kind is Kind.rl  # the rows of other kinds describe stored responses
    metrics = [each for each in LEARNING if sampled or not each.name.startswith("objective/")]
    caption = MEANS + _INTERVALS + _meanings(section.drawn)
    runs = [run for group in section.drawn for run in group.runs]
    x = next(name for name in _PROGRESS if all(name in run.rows[0] for run in runs))
    return _curves(section, "learning_curves", "Learning curves", caption, metrics, x)


def _optimization(section: Section) -> _Made:
    """Return the figure of loss, training accuracy, gradient norm, learning rate and memory."""
    caption = (
        f"{MEANS}All values are those of training rows. Losses and margins of different algorithms have "
        "different scales, so each algorithm has its own axes."
    )
    return _curves(section, "optimization", "Loss, gradients, learning rate, memory", caption, OPTIMIZATION)


def _off_policyness(section: Section) -> _Made:
    """Return the figure of the lag of samples and of the mismatch of sampler and trainer."""
    if section.kind is not Kind.rl:
        return None, []
    caption = (
        "Lag is the version being trained minus the version that sampled the batch. Mismatch compares the "
        "log-probs of the sampled tokens by the trainer, just before the update, with those by the sampler "
        "(mismatch/kl, mismatch/max_ratio). The effective sample size of the weights trainer / sampler of "
        f"responses is 1 on-policy (mismatch/ess). {MEANS}"
    )
    return _curves(section, "lag_and_mismatch", "Lag and mismatch", caption, OFF_POLICY)


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
    made = [panels_of(groups, metric, figure(x), _PROGRESS[x]) for metric in metrics]
    panels = [panel for shown, _ in made for panel in shown]
    remarks = [remark for _, skipped in made for remark in skipped]
    chart = Chart(name, title, caption + _averaging_note(groups), panels, drawing.legend(groups))
    return chart if panels else None, remarks


def _against_time(section: Section) -> _Made:
    """Return the figure of the main metric over the time of training."""
    main = section.main
    timed = [group for group in section.drawn if has(group, "time/update_s")]
    if main is None or not main.evaluated or not timed:
        return None, []
    longest = max(run.seconds() for group in timed for run in group.runs)
    scale, unit = next(
        (s, u) for s, u in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest > 2 * s or s == 1
    )

    def clock(run: Any, row: Any) -> float | None:
        took = seconds(run, row)
        return None if took is None else took / scale

    panels, _ = panels_of(timed, main, clock, f"time of training ({unit})")
    if not panels:
        return None, []
    virtual = [group for group in timed if has(group, "rollouts/time_s")]
    panels += panels_of(
        virtual, main, lambda run, row: run.loads.get(row["update"]), "virtual time (seconds)"
    )[0]
    chart = Chart(
        "win_rate_against_time",
        f"{topic(main)} vs. time",
        f"Each point is an evaluation ({main.name}) over the total time of the updates before it: waiting, "
        "scoring, log-probs, training and weight transfer (time/update_s), without loading, evaluation and "
        f"checkpoints. {MEANS}{_INTERVALS}Times are comparable only on the same hardware without other load"
        + (", virtual times (rollouts/time_s) on all machines." if virtual else "."),
        panels,
        drawing.legend(timed),
    )
    return chart, []


def time_per_phase(section: Section) -> _Made:
    """Return the figure of the seconds of an update by phase."""
    groups = [group for group in section.drawn if any(run.seconds() for run in group.measured)]
    if not groups:
        return None, []
    used = {**ELSEWHERE, **PHASES}
    times = [times_of(group) for group in groups]
    parallel = any(thin for _, thin in times)

    def draw(axes: Axes) -> None:
        for row, (group, (thick, thin)) in enumerate(zip(groups, times, strict=True)):
            left = 0.0
            for phase, took in thick.items():
                left += drawing.bar(axes, row, 0.34, left, took, used[phase][1])
            axes.annotate(
                f"{left:.3g} s", (left, row), (4, 0), textcoords="offset points", verticalalignment="center"
            )
            beside = 0.0
            for phase, took in thin.items():
                beside += drawing.bar(axes, row + 0.27, 0.12, beside, took, used[phase][1])
            if len(groups) > 1:
                axes.annotate(
                    group.label, (0, row - 0.2), (0, 2), textcoords="offset points", color=INK, fontsize=8.5
                )
        axes.set(xlabel="seconds per update (mean)", ylim=(len(groups) - 0.5, -0.6))
        axes.margins(x=0.14)
        drawing.plain_labels(axes.xaxis)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)

    phases = [phase for phase in used if any(phase in thick or phase in thin for thick, thin in times)]
    chart = Chart(
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
        [Key(*used[phase]) for phase in phases],
    )
    return chart, []


def times_of(group: Group) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds per update by phase: phases of the trainer, and work in parallel with the trainer.

    In a synchronous run, and in virtual time, the trainer waits for the sampling, so the sampling is a phase
    of the trainer.
    """
    thick = {phase: _per_update(group, phase) for phase in PHASES}
    thin = {phase: _per_update(group, phase) for phase in ELSEWHERE}
    if group.config.get("schedule.max_lag", 0) == 0 or group.config.get("clock.name") == "virtual":
        for phase in reversed(ELSEWHERE):
            inside = min(thin.pop(phase), thick["wait"])
            thick = {phase: inside, **thick, "wait": thick["wait"] - inside}
    total = sum(thick.values())
    return (
        {phase: took for phase, took in thick.items() if took > 0.001 * total},
        {phase: took for phase, took in thin.items() if took > 0.001 * total},
    )


def _per_update(group: Group, phase: str) -> float:
    """Return the seconds of `time/<phase>_s` per update, averaged over the runs that have updates."""
    values = [run.seconds(phase) / run.trained[-1]["update"] for run in group.measured if run.trained]
    return sum(values) / len(values) if values else 0.0


def panels_of(
    groups: Sequence[Group], metric: Metric, x: Read, unit: str, points: bool = False
) -> tuple[list[Panel], list[str]]:
    """Return the panels of one metric: one for each scale of the metric (`by_scale`), at most `_SCALES`.

    Args:
        groups: the groups to draw; groups without the metric are left out.
        metric: the metric of the y axis.
        x: returns the x value of a row.
        unit: label of the x axis.
        points: draw the last evaluation of each group as a large point, and no bands.

    Returns:
        The panels, and a remark if the metric or one of its scales is not drawn.
    """
    measured = [group for group in groups if has(group, metric.name)]
    if not measured:
        return [], []
    if all(quiet(group, metric) for group in measured):
        return [], [f"{metric.name} (always {metric.expected:g})"]
    scales = by_scale(measured, metric.scale)
    remarks = [f"{metric.name} of {label}" for label, _ in scales[_SCALES:]]
    panels = []
    for label, members in scales[:_SCALES]:
        if all(quiet(group, metric) for group in members):
            remarks.append(f"{metric.name} of {label} (always {metric.expected:g})")
            continue
        drawn = [points for group in members for points, _ in lines(group, x, partial(_read, metric))]
        if max(map(len, drawn), default=0) < 2:
            known = ((group.label, group.value(metric)) for group in members)
            values = ", ".join(f"{name} {metric.text(value)}" for name, value in known if value is not None)
            remarks += [f"{metric.name} (a single value: {values})"] if values else []
            continue
        title = f"{metric.title}\n{label}" if label else metric.title
        panels.append(Panel(partial(_draw_metric, members, metric, x, unit, title, points)))
    return panels, remarks


def _draw_metric(
    groups: Sequence[Group], metric: Metric, x: Read, unit: str, title: str, points: bool, axes: Axes
) -> None:
    """Draw the panel of a metric on `axes`; the other arguments are those of `panels_of`."""
    y, interval = partial(_read, metric), partial(bounds, name=metric.name)
    if points:
        for group in groups:
            for curve, finished in lines(group, x, y, interval):
                drawing.trace(axes, group, curve, finished, band=False)
                if finished:
                    drawing.crosshair(axes, group, curve[-1])
    else:
        drawing.draw_all(axes, groups, x, y, interval)
    axes.set(xlabel=unit, title=title)
    low, high = axes.dataLim.intervaly
    if metric.logarithmic and low > 0 and high > _WIDE * low:
        axes.set_yscale("log")
    else:
        drawing.widen(axes, 10.0**-metric.decimals)
    if metric.rate:
        drawing.within_a_rate(axes)
    if unit in _PROGRESS.values():
        drawing.whole_numbers(axes.xaxis)
    drawing.plain_labels(axes.xaxis)
    drawing.plain_labels(axes.yaxis)


def _read(metric: Metric, run: Run, row: Row) -> float | None:
    """Return a metric of a row; a metric of training only of a row that an update wrote."""
    return row.get(metric.name) if metric.evaluated or "lr" in row else None


def has(group: Group, name: str) -> bool:
    """Return whether a row of the group has the metric `name`."""
    return any(name in row for run in group.runs for row in run.rows)


def quiet(group: Group, metric: Metric) -> bool:
    """Return whether every value of the metric is its expected value, apart from rounding noise."""
    if not metric.noise:
        return False
    values = (row[metric.name] for run in group.runs for row in run.rows if metric.name in row)
    return all(abs(value - metric.expected) <= metric.noise for value in values)


def _meanings(groups: Sequence[Group]) -> str:
    """Return the sentences of `_OVER_KL` about the metrics that a group has."""
    return "".join(text for name, text in _OVER_KL.items() if any(has(group, name) for group in groups))


def topic(metric: Metric) -> str:
    """Return the metric in headings "<metric> vs. KL" and "<metric> vs. time"."""
    return capital(metric.heading.partition(" vs. ")[0])


def _averaging_note(groups: Sequence[Group]) -> str:
    """Return a sentence about averaged points if a run has more than `POINTS` updates, else an empty text."""
    longest = max((len(run.trained) for group in groups for run in group.runs), default=0)
    note = f" Curves of more than {POINTS} updates are averaged over neighbouring updates."
    return note if longest > POINTS else ""


def named(chart: Chart, suffix: str) -> Chart:
    """Return the chart with another file name; each section of a page has its own names."""
    return replace(chart, name=f"{chart.name}_{suffix}") if suffix else chart


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
    return {chart.name: chart.png() for section in sections([finished]) for chart in charts(section)[0]}
