"""Figures of a report: win rate vs. KL and vs. time, learning curves, lag and mismatch, time per phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.report.curves import POINTS, figure, seconds
from rlhf.report.drawing import (
    INK,
    STYLE,
    Chart,
    bar,
    crosshair,
    draw_all,
    legend,
    lines,
    panels,
    trace,
    whole_labels,
    whole_numbers,
    widen,
    wrapped,
)
from rlhf.report.groups import by_task

if TYPE_CHECKING:
    from rlhf.report.groups import Group

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

# Metrics of the learning curves: name in metrics.jsonl, title with unit.
LEARNING = (
    ("eval/win_rate", "gold win rate vs. reference responses"),
    ("eval/gold_score", "gold score"),
    ("objective/scores", "training score"),
    ("eval/accuracy", "accuracy on held-out pairs"),
    ("eval/loss", "held-out loss (nats)"),
    ("eval/kl", "KL to the reference (nats per response)"),
    ("eval/response_tokens", "response length (tokens)"),
    ("objective/entropy", "entropy estimate (nats per response)"),
)

# Metrics of the figure of lag and mismatch: name in metrics.jsonl, title with unit.
OFF_POLICY = (
    ("lag", "lag (updates)"),
    ("mismatch/token_lag", "lag of a token (updates)"),
    ("mismatch/kl", "KL of sampler and trainer (nats per token)"),
    ("mismatch/max_ratio", "largest ratio of trainer to sampler"),
    ("policy/clipfrac", "fraction of clipped ratios"),
)

PROGRESS = (("episode", "episodes"), ("examples", "examples"), ("update", "updates"))  # name in a row, label


def charts(groups: Sequence[Group]) -> tuple[list[Chart], list[str]]:
    """Draw every figure for which `groups` have data, once for each task.

    Returns:
        The figures, and for each figure without data its name with the reason.
    """
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
    """Draw win rate and gold score over the KL to the reference, or return why there is no figure."""
    names = {"eval/win_rate": "gold win rate", "eval/gold_score": "gold score"}
    present = [name for name in names if has(groups, name) and has(groups, "eval/kl")]
    if not present:
        return "win rate vs. KL (no run has eval/win_rate and eval/kl)"
    drawing, axes = panels(len(present), height=4.4)
    for axis, name in zip(axes, present, strict=True):
        for group in groups:
            for points, finished in lines(group, figure("eval/kl"), figure(name)):
                trace(axis, group, points, finished, band=False)
                if finished:
                    crosshair(axis, group, points[-1])
        axis.set(xlabel="KL to the reference (nats per response)", ylabel=names[name])
        widen(axis, name)
    legend(drawing, groups)
    return Chart(
        "win_rate_against_kl",
        "Win rate vs. KL",
        "Each point is an evaluation; lines join the evaluations in the order of training. The large point "
        "is the last evaluation, and its bars are the range over seeds. Both axes are means over seeds. The "
        "win rate is the fraction of held-out prompts for which the gold judge scores the near-greedy "
        "response strictly higher than the reference response (eval/win_rate). The gold score is the mean "
        "score by the judge (eval/gold_score). KL is estimated on samples at the training temperature "
        "(eval/kl). A higher value at the same KL is better.",
        drawing,
    )


def learning_curves(groups: Sequence[Group]) -> Chart | str:
    """Draw the metrics in `LEARNING` over the progress of training, or return why there is no figure."""
    present = [(name, title) for name, title in LEARNING if has(groups, name)]
    if not present:
        return "learning curves (no run has metrics yet)"
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
        "Lines are means over seeds; bands are the range over seeds. Gold metrics, KL, length and held-out "
        "metrics are measured on held-out prompts; training score and entropy on the samples trained on "
        f"(rows of metrics.jsonl, by {x}).{averaging_note(groups)}",
        drawing,
    )


def against_time(groups: Sequence[Group]) -> Chart | str:
    """Draw win rate, accuracy or loss over the time of training, or return why there is no figure."""
    name = next((name for name in ("eval/win_rate", "eval/accuracy", "eval/loss") if has(groups, name)), None)
    if name is None or not has(groups, "time/update_s"):
        return "win rate vs. time (no run has evaluations and times)"
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
        "Win rate vs. time",
        f"Each point is an evaluation ({name}) over the total time of the updates before it. The time is the "
        "sum of time/update_s: waiting, scoring, log-probs, training and weight transfer, without loading, "
        "evaluation and checkpoints. Both axes are means over seeds; bands are the range over seeds. Times "
        "are comparable only between runs on the same hardware without other load.",
        drawing,
    )


def off_policyness(groups: Sequence[Group]) -> Chart | str:
    """Draw the lag of samples and the mismatch of sampler and trainer, or return why there is no figure."""
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
        "Lag is the version being trained minus the version that sampled the batch. Mismatch compares the "
        "log-probs of the sampled tokens by the trainer, just before the update, with those by the sampler "
        "(mismatch/kl, mismatch/max_ratio). Lines are means over seeds; bands are the range over seeds."
        + (f" Not drawn, because always 0: {zero}." if zero else "")
        + averaging_note(groups),
        drawing,
    )


def time_per_phase(groups: Sequence[Group]) -> Chart | str:
    """Draw the seconds of an update by phase, or return why there is no figure."""
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
        "Time per update by phase",
        "Thick bar: the phases of the trainer, one after the other (time/wait_s, score_s, annotate_s, "
        "train_s and sync_s, divided by the number of updates; means over seeds). Thin bar: sampling, and "
        "scores and log-probs computed ahead (time/generate_s, time/annotate_ahead_s), one after the other, "
        "in whichever process they ran. If the generator runs in the trainer's process, its time is part of "
        "the waiting. If the generator has its own process, the phases of both bars run in parallel.",
        drawing,
    )


def has(groups: Sequence[Group], name: str, other_than: float | None = None) -> bool:
    """Return whether a run has the metric `name` with a value different from `other_than`."""
    rows = (row for group in groups for run in group.runs for row in run.rows)
    return any(name in row and row[name] != other_than for row in rows)


def progress_axis(groups: Sequence[Group]) -> tuple[str, str]:
    """Return the first entry of `PROGRESS` that is in the rows of all runs: the name and its label."""
    runs = [run for group in groups for run in group.runs if run.rows]
    return next((name, unit) for name, unit in PROGRESS if all(name in run.rows[0] for run in runs))


def averaging_note(groups: Sequence[Group]) -> str:
    """Return a sentence about averaged points if a run has more than `POINTS` updates, else an empty text."""
    longest = max(len(run.trained) for group in groups for run in group.runs)
    note = f" Curves of more than {POINTS} updates are averaged over neighbouring updates."
    return note if longest > POINTS else ""


def per_update(group: Group, phase: str) -> float:
    """Return the seconds of `time/<phase>_s` per update, averaged over the runs that have updates."""
    values = [run.seconds(phase) / run.trained[-1]["update"] for run in group.measured if run.trained]
    return sum(values) / len(values)
