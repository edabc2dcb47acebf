"""Sections of a report: groups of runs that differ only in the seed, their labels, tables and sentences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, combinations, product, zip_longest
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from rlhf.config.schema import Affects
from rlhf.core.files import component
from rlhf.core.formatting import bounds
from rlhf.report.runs import LISTS, METRICS, Kind, Status, duration, kind_of, main_metric, number, value_of
from rlhf.words.compose import added_later, affecting, not_in_name

if TYPE_CHECKING:
    from rlhf.core.statistics import Estimate
    from rlhf.report.runs import FoundRuns, Metric, Run

# Sections: runs of one kind on one data set, in groups that differ only in the seed.


LINES = 8  # largest number of lines of a figure
_LENGTH = ("schedule.total_episodes", "schedule.total_epochs")  # only runs of one length are ranked


@dataclass(eq=False)
class Group:
    """Runs with one config and different seeds.

    Attributes:
        runs: the runs, ordered by seed.
        label: the settings in which the group differs from the other groups of its section.
        index: position among all groups of the report.
        place: position among the groups that are drawn in the figures of the section; determines colour and
            marker. None: the group is not drawn.
    """

    runs: tuple[Run, ...]
    label: str = ""
    index: int = 0
    place: int | None = None

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
        drawn = (group for group in self.groups if group.place is not None)
        return sorted(drawn, key=lambda group: group.place or 0)


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
    ordered = (sorted(each, key=lambda run: (run.seed, str(run.folder))) for each in together.values())
    groups, chosen = _ordered([Group(tuple(each)) for each in ordered], main_metric(kind, runs))
    for group, name in zip(groups, labels([each.config for each in groups]), strict=True):
        group.label, group.index = name, index + groups.index(group)
        group.place = chosen.index(group) if group in chosen else None
    return Section(kind, data, tuple(groups))


def _ordered(groups: Sequence[Group], main: Metric | None) -> tuple[list[Group], list[Group]]:
    """Return all groups, best first, and the groups to draw.

    Groups of other lengths or scales (see `by_scale`) are ordered separately, one list after the other. A
    list contributes its best group to the figures before any list contributes its second best.

    Args:
        groups: the groups of a section.
        main: the main metric of the section.
    """

    def worth(group: Group) -> tuple[bool, bool, float]:
        value = None if main is None else group.value(main)
        better = 1 if main is None or main.better >= 0 else -1
        return not group.finished, value is None, -better * (value or 0.0)

    lists = by_scale(groups, main.scale if main else "", _LENGTH)
    scales = [sorted(members, key=worth) for _, members in lists]
    scales.sort(key=lambda members: not members[0].finished)
    ranked = [group for rank in zip_longest(*scales) for group in rank if group]
    lines = accumulate(bool(group.finished) + bool(group.unfinished) for group in ranked)
    chosen = [group for group, count in zip(ranked, lines, strict=True) if count <= LINES]
    every = [group for members in scales for group in members]
    return every, sorted(chosen, key=every.index)


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
        key = json.dumps(_scale_of(group.config, scale, also), sort_keys=True, default=str)
        scales.setdefault(key, []).append(group)
    if len(scales) < 2:
        return [("", members) for members in scales.values()]
    settings = [_scale_of(members[0].config, scale, also) for members in scales.values()]
    return list(zip(labels(settings, scale or "length"), scales.values(), strict=True))


def _scale_of(config: _Config, scale: str, also: Sequence[str]) -> _Config:
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

_UNCLEAR = ("path", "url", "kind", "level", "weight", "rank")  # ends of keys that need their section


def differing(configs: Sequence[_Config]) -> list[str]:
    """Return the keys in which configs differ, in the order of `labels` in metrics.yaml.

    Runs that differ only in the seed, or in keys that affect nothing, are one group. Keys that affect the
    speed separate groups, and come last. A missing key is equal to its value in `added_later`, or null.
    """
    every = dict.fromkeys(key for config in configs for key in config)
    hidden, last = {"seed", *affecting(Affects.nothing)}, set(not_in_name())
    kept = [key for key in every if key not in hidden and not key.startswith("logger.")]
    found = [key for key in kept if len({_identity(config, [key]) for config in configs}) > 1]
    first = {key: place for place, key in enumerate(LISTS["labels"].split())}
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
        return [joined(["algo.name"], column(configs, "algo.name")) or noun]
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


def column(configs: Sequence[_Config], key: str) -> list[str | None]:
    """Return the values of `key` as on a command line; None where a config does not have the key.

    Folders are left out of paths, as long as different values remain different.
    """
    values = [config[key] for config in configs if key in config]
    texts = [x if isinstance(x, str) else json.dumps(x, default=str).replace('"', "") for x in values]
    short = iter(_short(texts))
    return [next(short) if key in config else None for config in configs]


def _short(values: Sequence[str]) -> list[str]:
    """Return each value without the folders before its last part, or with as few as keep values different."""
    parts = [value.rstrip("/").split("/") for value in values]
    different = len(set(values))
    for count in range(1, max(map(len, parts), default=1) + 1):
        ends = ["/".join(each[-count:]) for each in parts]
        if len(set(ends)) == different:
            return ends
    return list(values)


# Tables of a section: results and settings, for the terminal, for Markdown and for the HTML page.


_COLUMNS, _SETTINGS = LISTS["columns"].split(), LISTS["settings"].split()
_DETAILS = _COLUMNS[6:]  # metrics whose columns follow the time

# Columns of costs: what they read from a run (None: not measured), and its text.
_COSTS: Mapping[str, tuple[Callable[[Run], float | None], Callable[[float], str]]] = {
    "time": (lambda run: run.seconds() or None, duration),
    "episodes/s": (
        lambda run: run.state.get("episode", 0) / run.seconds() if run.seconds() else None,
        lambda value: number(value, 1 if value < 10 else 0),
    ),
    "peak GiB": (lambda run: run.peak_gib, lambda value: number(value, 1)),
}

TERMINAL_ROWS = 20  # largest number of rows in the terminal
_TERMINAL_LABEL, _TERMINAL_COLUMN = 26, 3  # largest width of a label; space between two columns


class _Cell(NamedTuple):
    """A value of a group, and its texts.

    Attributes:
        after: mean over the runs, at the last evaluation.
        final: `after` as text.
        initial: mean before training; None if the value was not measured before training.
        spread: range over seeds, or the 95 % confidence interval of a single run; empty without either.
    """

    after: float
    final: str
    initial: str | None = None
    spread: str = ""

    def __str__(self) -> str:
        change = self.final if self.initial is None else f"{self.initial} → {self.final}"
        return f"{change} ({self.spread})" if self.spread else change


class _Results(NamedTuple):
    """A table of column headings and one row of cells per group; None: the group lacks the metric."""

    columns: list[str]
    rows: list[tuple[Group, list[_Cell | None]]]


def results(section: Section) -> _Results:
    """Return the table of the last evaluation and the cost, averaged over the finished runs of each group.

    If a group has no finished run, the mean is over its unfinished runs.
    """
    main = [section.main.name] if section.main else []
    present = [name for name in _COLUMNS if any(run.last(name) is not None for run in section.runs)]
    names = list(dict.fromkeys([*main, *present]))
    late = [name for name in names if name in _DETAILS and name not in main]
    pace = ["episodes/s"] if section.kind is Kind.rl else []
    columns = [*(name for name in names if name not in late), "time", *late, *pace, "peak GiB"]
    rows = [(group, [_cell(group.measured, name) for name in columns]) for group in section.groups]
    return _Results([METRICS[name].heading if name in METRICS else name for name in columns], rows)


def _cell(runs: Sequence[Run], name: str) -> _Cell | None:
    """Return the cell of a metric or of a cost; None if no run has a value."""
    if name in _COSTS:
        read, show = _COSTS[name]
        costs = [value for run in runs if (value := read(run)) is not None]
        return _Cell(mean(costs), show(mean(costs))) if costs else None
    known = {run: value for run in runs if (value := run.last(name)) is not None}
    if not known:
        return None
    show = METRICS[name].text
    before = [value for run in known if (value := run.first(name)) is not None]
    low, high = show(min(known.values())), show(max(known.values()))
    spread = f"{low} to {high}" if low != high else ""
    alone = len(runs) == 1 and runs[0].evaluations
    if not spread and alone and (interval := bounds(alone[-1], name)):
        spread = "95 %: {} to {}".format(*map(show, interval))
    initial = show(mean(before)) if len(before) == len(known) else None  # both means are of the same runs
    return _Cell(mean(known.values()), show(mean(known.values())), initial, spread)


class _Settings(NamedTuple):
    """The settings of a section.

    Attributes:
        shared: settings that all groups share, each as `key=value`; only those in `_SETTINGS`.
        keys: keys in which the groups differ.
        headings: headings of these keys.
        rows: one row per group: the value of each key, None if the group does not have the key.
    """

    shared: list[str]
    keys: list[str]
    headings: list[str]
    rows: list[tuple[Group, list[str | None]]]


def settings(section: Section) -> _Settings:
    """Return the settings of a section.

    Keys that only some algorithms have, with one value wherever they occur, are shown if they are in
    `_SETTINGS`.
    """
    configs = [group.config for group in section.groups]
    keys = [
        key
        for key in differing(configs)
        if key in _SETTINGS or len({str(config[key]) for config in configs if key in config}) > 1
    ]
    columns = [column(configs, key) for key in keys]
    shared = [
        joined([key], column(configs[:1], key))
        for key in _SETTINGS
        if key not in keys and configs[0].get(key) not in (None, "none") and configs[0].get(key) != 0
    ]
    if all(group.label == joined(keys, row) for group, *row in zip(section.groups, *columns, strict=True)):
        keys, columns = [], []  # the labels contain all settings
    rows = [(group, [values[place] for values in columns]) for place, group in enumerate(section.groups)]
    return _Settings(shared, keys, headings(keys), rows)


def for_terminal(found: _Results, width: int) -> Table:
    """Return the table for the terminal; groups without a finished run are dimmed.

    Args:
        found: the table.
        width: largest width in columns. Columns that do not fit are left out, from the right. Rows after
            the first `TERMINAL_ROWS` are left out, too.
    """
    label = min(_TERMINAL_LABEL, max(len(group.label) for group, _ in found.rows))
    left = width - label - max(5, *(len(group.count) for group, _ in found.rows)) - 3 * _TERMINAL_COLUMN
    texts = [["" if each is None else each.final for each in cells] for _, cells in found.rows]
    shown: dict[int, int] = {}  # index of the column -> width
    for place, heading in enumerate(found.columns):
        wide = max(map(len, [*(row[place] for row in texts), *heading.split(), heading[:8]]))
        if wide + _TERMINAL_COLUMN <= left:
            shown[place] = wide
            left -= wide + _TERMINAL_COLUMN
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="bold", width=label)
    table.add_column("seeds", min_width=5)
    for place, wide in shown.items():
        table.add_column(found.columns[place], justify="right", width=wide)
    for (group, _), row in zip(found.rows[:TERMINAL_ROWS], texts, strict=False):
        cells = (row[place] for place in shown)
        table.add_row(escape(group.label), group.count, *cells, style=None if group.finished else "dim")
    if len(found.rows) > TERMINAL_ROWS:
        table.caption = f"{len(found.rows) - TERMINAL_ROWS} more settings: see the page, or add --markdown"
    return table


def for_markdown(found: _Results) -> str:
    """Return the table in Markdown."""
    rows = [["setting", "seeds", *found.columns]]
    for group, cells in found.rows:
        figures = ["" if each is None else str(each) for each in cells]
        rows.append([f"`{group.label}`", group.seeds, *figures])
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


# Sentences of a report: the result of a section, and remarks that a reader needs before comparing runs.


_SCALES = 3  # largest number of scales for which a sentence states the result
_NAMED = 8  # largest number of labels or folders in a remark


def result(section: Section) -> str:
    """Return the result of a section in a few sentences: the best setting, its change, KL and time."""
    main = section.main
    if main is None:
        return "No evaluation and no update yet."
    measured = [group for group in section.groups if group.value(main) is not None]
    scales = by_scale(measured, main.scale, _LENGTH)
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
    cell = _cell(best.measured, main.name)
    assert cell is not None  # the group has the metric
    alone = cell.initial is None or (cell.initial == cell.final and not best.finished)
    count = sum(run.last(main.name) is not None for run in best.measured)
    said = f"{main.title} {cell.final if alone else f'from {cell.initial} to {cell.final}'}"
    if cell.spread:
        said += f" ({f'{count} seeds: ' if count > 1 else ''}{cell.spread})"
    parts = [capital(said)]
    fair = [group for group in groups if group.finished or not best.finished]
    values = [group.value(main) or 0.0 for group in fair]
    tied = [g.label for g, x in zip(fair, values, strict=True) if main.text(x) == main.text(values[0])]
    if len(groups) > 1:
        tie = f"{len(tied)} of {len(groups)} settings tie: {some(tied)}"
        parts = [f"Best of {len(groups)} settings: {best.label}" if len(tied) == 1 else tie, said]
    if main.evaluated and (kl := _cell(best.measured, "eval/kl")):
        parts.append(f"KL {kl.final}")
    if seconds := [run.seconds() for run in best.measured if run.seconds()]:
        parts.append(f"{duration(sum(seconds) / len(seconds))} of training")
    if not best.finished:
        parts.append("unfinished")
    if len(groups) > 1 and len(tied) < len(values):
        parts.append(f"worst setting {main.text(min(values) if main.better >= 0 else max(values))}")
    return (f"{label}: " if label else "") + ", ".join(parts) + "."


def remarks(sections: Sequence[Section], found: FoundRuns) -> list[str]:
    """Return remarks that a reader needs before comparing the runs."""
    groups = [group for section in sections for group in section.groups]
    runs = [run for group in groups for run in group.runs]
    notes = []
    if unfinished := sum(len(group.unfinished) for group in groups):
        runs_of = f"{unfinished} unfinished run{'s' * (unfinished > 1)}"
        notes.append(f"{runs_of}: dashed in the figures, not part of means.")
    if repeated := [each.label for each in groups if len({run.seed for run in each.runs}) < len(each.runs)]:
        said = "Several folders have the same settings and seed, and each counts as a run"
        notes.append(f"{said}: {some(repeated)}.")
    few = []
    for group, name in product(groups, METRICS):
        count, every = sum(run.last(name) is not None for run in group.measured), len(group.measured)
        if 0 < count < every:
            few.append(f"{name} ({count} of {every} of {group.label})")
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
    warnings = {run: [row["update"] for row in run.trained if row.get("warning/collapse")] for run in runs}
    if warned := [f"{run.folder.name} (update {at[0]:.0f})" for run, at in warnings.items() if at]:
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
    drawn = f"{len(section.drawn)} of {len(section.groups)} settings{best}"
    return f"The figures show {drawn}. Not drawn: {some(others)}."


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def some(names: Sequence[str]) -> str:
    """Return the first `_NAMED` names, and the number of the others."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


# Differences between the settings of a section: paired, with an interval and a verdict in words.


_SEEDS, _PROMPTS = 3, 20  # fewest seeds, and fewest prompts, over which a difference is estimated


class _Difference(NamedTuple):
    """The difference of the main metric between the best setting and another setting.

    Attributes:
        best: the setting with the best mean.
        other: the setting that it is compared with.
        metric: the metric.
        estimate: mean of the paired differences, best minus other, with its 95 % interval.
        p: p-value, corrected by Holm for all comparisons with the best setting.
        pairs: what is paired, such as "5 seeds".
    """

    best: Group
    other: Group
    metric: Metric
    estimate: Estimate
    p: float
    pairs: str

    def __str__(self) -> str:
        from rlhf.core.statistics import LEVEL

        by, low, high, _ = self.estimate
        if self.metric.better < 0:
            by, low, high = -by, -high, -low
        by_text, *limits = map(self.metric.text, (by, low, high))
        interval = f"{by_text} [{', '.join(limits)}], paired over {self.pairs}"
        if self.p < LEVEL and by > 0:
            return f"{self.best.label} beats {self.other.label} by {interval}."
        return f"{self.best.label} vs. {self.other.label}: undecided, difference {interval}."


def differences(section: Section) -> list[_Difference]:
    """Return the differences of the main metric between the best setting and other comparable settings.

    If the settings have at least `_SEEDS` seeds in common, values are paired over seeds. Otherwise they are
    paired over held-out prompts, which are the same in all runs; this says nothing about other seeds.
    Unfinished runs are not compared.
    """
    from rlhf.core.statistics import holm, mean_interval, p_t, p_value

    metric = section.main
    if metric is None or not metric.evaluated or not metric.better:
        return []
    scores = cache(partial(_scores_of, name=metric.name))  # the completions of a run are read once
    found: list[_Difference] = []
    finished = [group for group in section.groups if group.finished and group.value(metric) is not None]
    for _, (best, *others) in by_scale(finished, metric.scale, _LENGTH):
        family, made = others[: LINES - 1], []
        for other in family:
            # Values of both settings by seed, and if there are few seeds, means over the seeds by prompt.
            both = [{run.seed: run.last(metric.name) for run in group.finished} for group in (best, other)]
            gaps = _gaps(*({seed: x for seed, x in each.items() if x is not None} for each in both))
            if len(gaps) >= _SEEDS:
                p, pairs = p_value(gaps, family=len(family)), f"{len(gaps)} seeds"
            else:
                runs = [[scores(run) for run in group.finished] for group in (best, other)]
                common = set.intersection(*(set(each) for several in runs for each in several))
                means = ({at: sum(x[at] for x in each) / len(each) for at in common} for each in runs)
                if len(gaps := _gaps(*means)) < _PROMPTS:
                    continue
                count = min(map(len, runs))
                p = p_t(gaps) if any(gaps) else 1.0
                pairs = f"{len(gaps)} prompts of {count} seed{'s' * (count > 1)}"
            made.append(_Difference(best, other, metric, mean_interval(gaps), p, pairs))
        corrected = holm([each.p for each in made])
        found += [each._replace(p=p) for each, p in zip(made, corrected, strict=True)]
    return found


def _gaps(best: Mapping[Any, float], other: Mapping[Any, float]) -> list[float]:
    """Return the differences of two settings, one for each seed or prompt that both have."""
    return [best[key] - other[key] for key in sorted(best.keys() & other.keys())]


def _scores_of(run: Run, name: str) -> Mapping[tuple[str, int], float]:
    """Return the value of a metric at the last evaluation by held-out prompt and number among equal texts.

    The result is empty if completions.jsonl has no such values, or cannot be read.
    """
    try:
        rows = run.completions()
    except ValueError:  # the page names the file
        return {}
    numbers: Counter[str] = Counter()
    found = {}
    for row in rows:
        if row["update"] == rows[-1]["update"]:
            numbers[row["prompt"]] += 1
            if (value := value_of(row, name)) is not None:
                found[row["prompt"], numbers[row["prompt"]]] = value
    return found


# Completions of the same held-out prompt by several groups, for comparison side by side.


class _Answer(NamedTuple):
    """A response of one run to a held-out prompt; `row` is the row of its completions.jsonl."""

    group: Group
    run: Run
    row: dict[str, Any]


class _Sample(NamedTuple):
    """A held-out prompt with the reference response and the responses of the groups.

    Attributes:
        prompt: text of the prompt.
        reference: text of the reference response; None if the prompt has none.
        reference_score: score of the reference response by the judge; None without a judge.
        before: completions.jsonl row of the response before training; None if there is no such row, or if the
            responses of the groups before training differ.
        answers: one response for each group that answered the prompt.
    """

    prompt: str
    reference: str | None
    reference_score: float | None
    before: dict[str, Any] | None
    answers: list[_Answer]


def samples(section: Section, count: int) -> tuple[list[_Sample], list[str]]:
    """Return up to `count` prompts, ordered by the number of groups that answered the prompt.

    The responses of a group are those of its run with the lowest seed, at the last evaluation of that run.
    Only the groups in the figures are included.

    Returns:
        The samples, and a remark about each run whose completions cannot be read.
    """
    answers: dict[str, list[_Answer]] = {}
    before: dict[str, list[dict[str, Any]]] = {}
    remarks: list[str] = []
    for group in section.drawn if count else ():
        for run in group.measured:
            try:
                if rows := run.completions():
                    break
            except ValueError as error:
                remarks.append(f"The completions of {run.folder.name} are not shown ({error}).")
        else:
            continue
        last = rows[-1]["update"]
        for prompt, row in {row["prompt"]: row for row in rows if row["update"] == last}.items():
            answers.setdefault(prompt, []).append(_Answer(group, run, row))
        for row in rows:
            if row["update"] == 0 < last:
                before.setdefault(row["prompt"], []).append(row)
    found = []
    for prompt in sorted(answers, key=lambda prompt: -len(answers[prompt]))[:count]:
        first, earlier = answers[prompt][0].row, before.get(prompt, [])
        same = len({row["response"] for row in earlier}) == 1
        scores = first.get("reference"), first.get("reference_gold_score")
        found.append(_Sample(prompt, *scores, earlier[0] if same else None, answers[prompt]))
    return found, remarks
