"""Sections of a report: runs of one kind on one data set, in groups that differ only in the seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Affects
from rlhf.core.files import component
from rlhf.report.runs import Kind, Metric, Status, kind_of, main_metric
from rlhf.words.compose import added_later, affecting, not_in_name

if TYPE_CHECKING:
    from rlhf.report.runs import Run


LINES = 8  # largest number of lines of a figure
_LENGTH = (
    "schedule.total_episodes",
    "schedule.total_epochs",
)  # runs of other lengths are not ranked together


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
    def config(self) -> _Config:
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
    def furthest(self) -> list[Run]:
        """The unfinished run with the most updates; empty if all runs are finished."""
        return sorted(self.unfinished, key=lambda run: -run.update)[:1]

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
        groups: the groups, best first; see `_ordered`.
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
    names = dict(zip(paths, _short(paths), strict=True))
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
        together.setdefault(_identity(run.config, keys), []).append(run)
    members = [
        Group("", tuple(sorted(group, key=lambda run: (run.seed, str(run.folder)))), 0, None)
        for group in together.values()
    ]
    main = main_metric(kind, runs)
    members, chosen = _ordered(members, main)
    places = {group: place for place, group in enumerate(chosen)}
    names = labels([group.config for group in members])
    groups = [
        Group(name, group.runs, index + offset, places.get(group))
        for offset, (name, group) in enumerate(zip(names, members, strict=True))
    ]
    return Section(kind, data, tuple(groups))


def _ordered(groups: Sequence[Group], main: Metric | None) -> tuple[list[Group], list[Group]]:
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
    return by_scale(groups, scale, _LENGTH)


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


def _scale_of(config: _Config, scale: str, also: Sequence[str] = ()) -> _Config:
    """Return the settings of a run that determine the scale of a metric, and `also`; see `Metric.scale`."""
    keys: list[str] = []
    if scale == "algo":
        keys = ["algo.name", "algo.loss_type"]
    elif scale:
        timing = ("batch_size", "concurrency", "timeout_s", "retries")  # do not influence scores
        own = [key for key in config if key.startswith(f"{scale}.") and not key.endswith(timing)]
        keys = [key for key in own if key not in not_in_name()]
        if config.get(f"{scale}.name") == "reward_model" and config.get(f"{scale}.path") is None:
            keys += ["model.reward", "stages.reward"]
    return {key: config[key] for key in (*keys, *also) if config.get(key) is not None}


# Labels: the settings in which runs differ, as at most three `key=value` pairs.


_Config = Mapping[str, Any]  # a flat config: dotted key -> value

_PAIRS = 3  # largest number of pairs of a label
_LONGEST_VALUE, LONGEST_LABEL = 28, 60  # characters
_CANDIDATES = 24  # number of keys whose combinations are tried

# Keys that labels and tables prefer; other keys follow in the order of the config.
_FIRST = """
algo.name model.name model.base model.policy algo.loss_type algo.beta algo.kl_coef optim.lr scorer.name
scorer.path generator.name schedule.max_lag schedule.update schedule.replay schedule.solved_at
backend.name schedule.total_episodes schedule.total_epochs schedule.prompts_per_update
algo.samples_per_prompt
"""

_UNCLEAR = ("path", "url", "kind", "level", "weight", "rank")  # ends of keys that need their section


def differing(configs: Sequence[_Config]) -> list[str]:
    """Return the keys in which configs differ, in the order of `_FIRST`.

    Runs that differ only in the seed, or in keys that affect nothing, are one group. Keys that affect the
    speed separate groups, and come last. A missing key is equal to its value in `added_later`, or null.
    """
    every = dict.fromkeys(key for config in configs for key in config)
    hidden, last = {"seed", *affecting(Affects.nothing)}, set(not_in_name())
    kept = [key for key in every if key not in hidden and not key.startswith("logger.")]
    found = [key for key in kept if len({_identity(config, [key]) for config in configs}) > 1]
    first = {key: place for place, key in enumerate(_FIRST.split())}
    return sorted(found, key=lambda key: (key in last, first.get(key, len(first))))


def _identity(config: _Config, keys: Iterable[str]) -> str:
    """Return the values of `keys` as one string, for comparison."""
    added = added_later()
    return json.dumps([config.get(key, added.get(key)) for key in keys], default=str)


def labels(configs: Sequence[_Config], noun: str = "run") -> list[str]:
    """Return a label for each config; the configs differ from each other.

    A label has up to `_PAIRS` pairs `key=value`, as few as distinguish all configs. The first pair is the
    algorithm if the configs differ in the algorithm. If no such labels exist, the labels are numbered:
    "run 1", "run 2", ...

    Args:
        configs: flat configs.
        noun: first part of numbered labels.
    """
    if len(configs) == 1:
        return [pair("algo.name", configs[0]["algo.name"])] if "algo.name" in configs[0] else [noun]
    keys = differing(configs)
    shown = {key: column(configs, key) for key in keys}
    usable = [key for key in keys if all(len(value or "") <= _LONGEST_VALUE for value in shown[key])]
    required = [key for key in usable if key == "algo.name"]
    others = [key for key in usable if key not in required][:_CANDIDATES]
    for count in range(_PAIRS + 1 - len(required)):
        for added in combinations(others, count):
            chosen = [*required, *added]
            rows = list(zip(*(shown[key] for key in chosen), strict=True))
            if len(set(rows)) == len(configs) and (None,) * len(chosen) not in rows:
                made = [joined(chosen, row) for row in rows]
                if max(map(len, made)) <= LONGEST_LABEL:
                    return made
    return [f"{noun} {place}" for place in range(1, len(configs) + 1)]


def joined(keys: Sequence[str], values: Sequence[str | None]) -> str:
    """Return the pairs of a label; a key without a value is left out."""
    named = zip(headings(keys), values, strict=True)
    return " ".join(f"{name}={value}" for name, value in named if value is not None)


def headings(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, for the name of an option its config group.

    If two keys end alike, or in an unclear word, the heading is the whole key.
    """
    parts = [key.split(".") for key in keys]
    ends = [part[-2] if part[-1] == "name" and len(part) > 1 else part[-1] for part in parts]
    whole = [ends.count(end) > 1 or end in _UNCLEAR for end in ends]
    return [key if keep else end for key, end, keep in zip(keys, ends, whole, strict=True)]


def pair(key: str, value: Any) -> str:
    """Return a setting as `key=value`; folders are left out of a path."""
    return joined([key], _short([_shown_value(value)]))


def column(configs: Sequence[_Config], key: str) -> list[str | None]:
    """Return the values of `key` as texts; None where a config does not have the key.

    Folders are left out of paths, as long as different values remain different.
    """
    present = [_shown_value(config[key]) for config in configs if key in config]
    names = dict(zip(present, _short(present), strict=True))
    return [names[_shown_value(config[key])] if key in config else None for config in configs]


def _shown_value(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")


def _short(values: Sequence[str]) -> list[str]:
    """Return each value without the folders before its last part, or with as few as keep values different."""
    parts = [value.rstrip("/").split("/") for value in values]
    different = len(set(values))
    for count in range(1, max(map(len, parts), default=1) + 1):
        ends = ["/".join(each[-count:]) for each in parts]
        if len(set(ends)) == different:
            return ends
    return list(values)
