"""Sections of a report: runs of one kind on one data set, in groups that differ only in the seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlhf.config.identity import not_in_name
from rlhf.core.files import component
from rlhf.report.labels import Config, differing, identity, labels, short
from rlhf.report.metrics import Kind, Metric, kind_of, main_metric
from rlhf.report.runs import Status

if TYPE_CHECKING:
    from rlhf.report.runs import Run

LINES = 8  # largest number of lines of a figure
LENGTH = ("schedule.total_episodes", "schedule.total_epochs")  # runs of other lengths are not ranked together


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with one config and different seeds.

    Attributes:
        label: the settings in which the group differs from the other groups of its section.
        runs: the runs, ordered by seed.
        index: position among all groups of the report.
        place: position among the groups that are drawn in the figures of the section; determines colour and
            marker. None: the group is not drawn.
    """

    label: str
    runs: tuple[Run, ...]
    index: int
    place: int | None

    @property
    def config(self) -> Config:
        """The config of the first run."""
        return self.runs[0].config

    @property
    def finished(self) -> list[Run]:
        """The finished runs; means and ranges are computed over these runs."""
        return [run for run in self.runs if run.status is Status.finished]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that are unfinished, stopped or failed."""
        return [run for run in self.runs if run.status is not Status.finished]

    @property
    def measured(self) -> list[Run]:
        """The finished runs; if no run is finished, the unfinished runs."""
        return self.finished or self.unfinished

    @property
    def furthest(self) -> Run | None:
        """The unfinished run with the most updates; None if all runs are finished."""
        return max(self.unfinished, key=lambda run: run.update, default=None)

    @property
    def seeds(self) -> str:
        """The number of finished seeds, and the progress of each unfinished run."""
        others = [f"seed {run.seed} {run.progress}" for run in self.unfinished]
        return "; ".join([str(len(self.finished)), *others])

    @property
    def count(self) -> str:
        """The number of finished seeds, with the number of all seeds if they differ."""
        done, every = len(self.finished), len(self.runs)
        return str(every) if done == every else f"{done} of {every}"

    def value(self, metric: Metric) -> float | None:
        """Return the mean of the last value of `metric` over the measured runs; None if no run has it."""
        known = [value for run in self.measured if (value := run.last(metric.name)) is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, eq=False)
class Section:
    """The runs of one kind on one data set, which share tables and figures.

    Attributes:
        kind: the kind of the runs.
        data: the name of the data set.
        groups: the groups, best first; see `ordered`.
    """

    kind: Kind
    data: str
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        """The heading of the section."""
        return f"{self.kind.heading} on {self.data}"

    @property
    def name(self) -> str:
        """The section in file names and ids: letters, digits, dots, dashes and underscores."""
        return component(f"{self.kind}_{self.data}", fill="_")

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def main(self) -> Metric | None:
        """The metric that states the result; None if no run has any metric."""
        return main_metric(self.kind, self.runs)

    @property
    def drawn(self) -> list[Group]:
        """The groups of the figures, in the order of their colours."""
        return sorted(
            (group for group in self.groups if group.place is not None), key=lambda group: group.place or 0
        )


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of a report, ordered by kind; runs without metrics are in no section."""
    found: dict[tuple[Kind, str, str], list[Run]] = {}
    for run in runs:
        if run.rows:
            task, path = str(run.config["task.name"]), str(run.config.get("task.path") or "")
            found.setdefault((kind_of(run), task, path), []).append(run)
    paths = list(dict.fromkeys(path for _, _, path in found if path))
    names = dict(zip(paths, short(paths), strict=True))
    made: list[Section] = []
    for kind, task, path in sorted(found, key=lambda key: list(Kind).index(key[0])):
        data = f"{task} ({names[path]})" if path else task
        index = sum(len(section.groups) for section in made)
        made.append(_section_of(kind, data, found[kind, task, path], index))
    return made


def _section_of(kind: Kind, data: str, runs: Sequence[Run], index: int) -> Section:
    """Return the section of runs of one kind on one data set; `index` is that of its first group."""
    keys = differing([run.config for run in runs])
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(identity(run.config, keys), []).append(run)
    members = [
        Group("", tuple(sorted(group, key=lambda run: (run.seed, str(run.folder)))), 0, None)
        for group in together.values()
    ]
    main = main_metric(kind, runs)
    members, chosen = ordered(members, main)
    places = {group: place for place, group in enumerate(chosen)}
    names = labels([group.config for group in members])
    groups = [
        Group(name, group.runs, index + offset, places.get(group))
        for offset, (name, group) in enumerate(zip(names, members, strict=True))
    ]
    return Section(kind, data, tuple(groups))


def ordered(groups: Sequence[Group], main: Metric | None) -> tuple[list[Group], list[Group]]:
    """Return all groups, best first, and the groups to draw.

    Groups that are not `comparable` are ordered separately, one list after the other. A list contributes its
    best group to the figures before any list contributes its second best.

    Args:
        groups: the groups of a section.
        main: the main metric of the section.
    """

    def worth(group: Group) -> tuple[bool, bool, float]:
        value = None if main is None else group.value(main)
        better = 1 if main is None or main.better >= 0 else -1
        return not group.finished, value is None, -better * (value or 0.0)

    scales = [sorted(members, key=worth) for _, members in comparable(groups, main.scale if main else "")]
    scales.sort(key=lambda members: not members[0].finished)
    ranked = sorted((rank, place) for place, members in enumerate(scales) for rank in range(len(members)))
    chosen: list[Group] = []
    lines = 0
    for rank, place in ranked:
        group = scales[place][rank]
        lines += bool(group.finished) + bool(group.unfinished)
        if lines > LINES:
            break
        chosen.append(group)
    every = [group for members in scales for group in members]
    return every, sorted(chosen, key=every.index)


def comparable(groups: Sequence[Group], scale: str) -> list[tuple[str, list[Group]]]:
    """Return groups that can be ranked: runs of one length, with one scale of the metric; see `by_scale`."""
    return by_scale(groups, scale, LENGTH)


def by_scale(groups: Sequence[Group], scale: str, also: Sequence[str] = ()) -> list[tuple[str, list[Group]]]:
    """Return groups whose values of a metric are comparable, each list with a label of its scale.

    Args:
        groups: groups of one section.
        scale: `Metric.scale` of the metric.
        also: further keys in which the groups of a list agree.

    Returns:
        The label is empty if there is only one scale.
    """
    scales: dict[str, list[Group]] = {}
    for group in groups:
        settings = json.dumps(_scale_of(group.config, scale, also), sort_keys=True, default=str)
        scales.setdefault(settings, []).append(group)
    if len(scales) < 2:
        return [("", members) for members in scales.values()]
    names = labels(
        [_scale_of(members[0].config, scale, also) for members in scales.values()], noun=scale or "length"
    )
    return list(zip(names, scales.values(), strict=True))


def _scale_of(config: Config, scale: str, also: Sequence[str] = ()) -> Config:
    """Return the settings of a run that determine the scale of a metric, and `also`; see `Metric.scale`."""
    if scale == "algo":
        keys = ["algo.name", "algo.loss_type"]
    elif scale:
        keys = [key for key in config if key.startswith(f"{scale}.") and _not_timing(key)]
        if config.get(f"{scale}.name") == "reward_model" and config.get(f"{scale}.path") is None:
            keys += [key for key in ("model.reward", "stages.reward") if key in config]
    else:
        keys = []
    return {key: config[key] for key in (*keys, *also) if config.get(key) is not None}


def _not_timing(key: str) -> bool:
    """Return whether a key of a scorer influences the scores."""
    return key not in not_in_name() and not key.endswith(
        ("batch_size", "concurrency", "timeout_s", "retries")
    )
