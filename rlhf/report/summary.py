"""Sentences of a report: the result of a section, and remarks that a reader needs before comparing runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rlhf.report.groups import comparable
from rlhf.report.metrics import METRICS, Metric, duration
from rlhf.report.table import metric_cell

if TYPE_CHECKING:
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import FoundRuns

_SCALES = 3  # largest number of scales for which a sentence states the result
_NAMED = 8  # largest number of labels or folders in a remark


def result(section: Section) -> str:
    """Return the result of a section in a few sentences: the best setting, its change, KL and time."""
    main = section.main
    if main is None:
        return "No evaluation and no update yet."
    measured = [group for group in section.groups if group.value(main) is not None]
    scales = comparable(measured, main.scale)
    texts = [_of_scale(members, main, label) for label, members in scales[:_SCALES]]
    if len(scales) > _SCALES:
        texts.append(f"{len(scales) - _SCALES} more are in the table.")
    if not main.evaluated:
        texts.append("There are no evaluations on held-out data.")
    return " ".join(texts)


def _of_scale(groups: Sequence[Group], main: Metric, label: str) -> str:
    """Return the sentence about the best of groups that can be compared.

    Args:
        groups: groups that have the metric, best first.
        main: the main metric.
        label: the label of their scale and length; empty if there is only one.
    """
    best = groups[0]
    cell = metric_cell(best.measured, main)
    assert cell is not None  # the group has the metric
    alone = cell.initial is None or (cell.initial == cell.final and not best.finished)
    change = cell.final if alone else f"from {cell.initial} to {cell.final}"
    count = sum(run.last(main.name) is not None for run in best.measured)
    seeds = f"{count} seeds: " if count > 1 else ""
    spread = f" ({seeds}{cell.spread})" if cell.spread else ""
    text = f"{capital(main.title)} {change}{spread}"
    if len(groups) > 1:
        fair = [group for group in groups if group.finished or not best.finished]
        rivals = [(group.label, group.value(main) or 0.0) for group in fair]
        tied = [label for label, value in rivals if main.text(value) == main.text(rivals[0][1])]
        first = f"Best of {len(groups)} settings: {best.label}"
        first = first if len(tied) == 1 else f"{len(tied)} of {len(groups)} settings tie: {some(tied)}"
        text = f"{first}, {main.title} {change}{spread}"
    kl = metric_cell(best.measured, METRICS["eval/kl"])
    parts = [text] + ([f"KL {kl.final}"] if kl is not None and main.evaluated else [])
    seconds = [run.seconds() for run in best.measured if run.seconds()]
    if seconds:
        parts.append(f"{duration(sum(seconds) / len(seconds))} of training")
    if not best.finished:
        parts.append("unfinished")
    if len(groups) > 1:
        values = [value for _, value in rivals]
        worst = main.text(min(values) if main.better >= 0 else max(values))
        parts += [f"worst setting {worst}"] if len(tied) < len(values) else []
    return (f"{label}: " if label else "") + ", ".join(parts) + "."


def remarks(sections: Sequence[Section], found: FoundRuns) -> list[str]:
    """Return remarks that a reader needs before comparing the runs."""
    groups = [group for section in sections for group in section.groups]
    runs = [run for group in groups for run in group.runs]
    notes = []
    if unfinished := sum(len(group.unfinished) for group in groups):
        notes.append(
            f"{unfinished} unfinished run{'s' * (unfinished > 1)}: dashed in the figures, not part of means."
        )
    repeated = [group.label for group in groups if len({run.seed for run in group.runs}) < len(group.runs)]
    if repeated:
        notes.append(
            f"Several folders have the same settings and seed, and each counts as a run: {some(repeated)}."
        )
    few = []
    for group, name in product(groups, METRICS):
        count = sum(run.last(name) is not None for run in group.measured)
        few += [f"{name} ({count} of {len(group.measured)} of {group.label})"] * (
            0 < count < len(group.measured)
        )
    if few:
        notes.append(f"Means over fewer runs than all, those that have the metric: {some(few)}.")
    if len({run.commit for run in runs}) > 1:
        notes.append("The runs were made with different commits of the code (see Runs).")
    if len({run.hardware for run in runs}) > 1:
        notes.append("The runs were made on different hardware, so their times are not comparable.")
    if empty := [run.folder.name for run in found.runs if not run.rows]:
        notes.append(f"No metrics yet: {some(empty)} (see Runs).")
    if lost := [f"{run.folder.name} ({run.lost})" for run in found.runs if run.lost]:
        notes.append(f"Rows are lost: {some(lost)}.")
    if warned := [f"{run.folder.name} (update {update})" for run in runs if (update := run.collapse_warning)]:
        notes.append(
            f"Runs that warned of a collapse of the policy: {some(warned)}. Compare their evaluations before "
            "and after the warning. If they fall, lower optim.lr or schedule.max_lag, or set an off-policy "
            "correction; the warning in train.log names the settings."
        )
    if found.broken:
        names = [f"{folder.name} ({reason})" for folder, reason in found.broken.items()]
        notes.append(f"Damaged run folders, not shown: {some(names)}.")
    return notes


def not_drawn(section: Section) -> str:
    """Return a sentence about the groups that the figures do not show; empty if there are none."""
    others = [group.label for group in section.groups if group.place is None]
    if not others:
        return ""
    best = f", those with the best {section.main.heading}" if section.main else ""
    return (
        f"The figures show {len(section.drawn)} of {len(section.groups)} settings{best}. "
        f"Not drawn: {some(others)}."
    )


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def some(names: Sequence[str]) -> str:
    """Return the first `_NAMED` names, and the number of the others."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
