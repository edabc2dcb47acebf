"""Tables of a section: results and settings, for the terminal, for Markdown and for the HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from rlhf.core.confidence import bounds
from rlhf.report.labels import column, differing, headings, joined, pair
from rlhf.report.metrics import METRICS, Kind, Metric, duration, number

if TYPE_CHECKING:
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import Run

# Metrics of the columns, by decreasing importance. Columns without values are left out.
_COLUMNS = (
    "eval/win_rate",
    "eval/accuracy",
    "eval/loss",
    "eval/gold_score",
    "eval/score",
    "eval/kl",
    "eval/win_rate_vs_initial",
    "eval/response_tokens",
    "eval/ppl",
)
_DETAILS = _COLUMNS[6:]  # metrics whose columns follow the time

# Settings that a reader looks for even if all runs have the same value.
_KEYS = """
algo.name model.name model.base model.policy model.lora.rank scorer.name scorer.path gold.name optim.lr
algo.beta algo.kl_coef schedule.total_episodes schedule.total_epochs schedule.prompts_per_update
algo.samples_per_prompt schedule.minibatches schedule.max_lag schedule.order schedule.update
schedule.max_age schedule.replay schedule.solved_at generator.name generator.temperature
generator.response_length backend.name clock.name clock.slots clock.spread
"""
_SETTINGS = _KEYS.split()

TERMINAL_ROWS = 20  # largest number of rows in the terminal
TERMINAL_LABEL, TERMINAL_COLUMN = 26, 3  # largest width of a label; space between two columns


@dataclass(frozen=True)
class Cell:
    """A value of a group.

    Attributes:
        before: mean before training; None if the value was not measured before training.
        after: mean over the runs, at the last evaluation.
        limits: smallest and largest value of a run.
        interval: 95 % confidence interval; None if not measured, or with several runs.
        show: returns a value as text.
    """

    before: float | None
    after: float
    limits: tuple[float, float]
    interval: tuple[float, float] | None
    show: Callable[[float], str]

    def __str__(self) -> str:
        change = self.final if self.initial is None else f"{self.initial} → {self.final}"
        return f"{change} ({self.spread})" if self.spread else change

    @property
    def initial(self) -> str | None:
        """The value before training as text; None if there is no such value."""
        return None if self.before is None else self.show(self.before)

    @property
    def final(self) -> str:
        """The value at the last evaluation as text."""
        return self.show(self.after)

    @property
    def spread(self) -> str:
        """The range over seeds, or the confidence interval of a single run, as text; empty without either."""
        low, high = map(self.show, self.limits)
        if low != high:
            return f"{low} to {high}"
        return "" if self.interval is None else "95 %: {} to {}".format(*map(self.show, self.interval))


_Column = tuple[str, Callable[[Sequence["Run"]], Cell | None]]  # heading, and the cell of the runs of a group


def _cost(heading: str, read: Callable[[Run], float | None], show: Callable[[float], str]) -> _Column:
    """Return the column of a cost: the mean over the runs that have a value."""

    def cell(runs: Sequence[Run]) -> Cell | None:
        known = [value for run in runs if (value := read(run)) is not None]
        return Cell(None, mean(known), (0.0, 0.0), None, show) if known else None

    return heading, cell


def _pace(run: Run) -> float | None:
    """Return the episodes per second of update time; None if the run has no times."""
    return run.episodes / run.seconds() if run.seconds() else None


_TIME = _cost("time", lambda run: run.seconds() or None, duration)
_PACE = _cost("episodes/s", _pace, lambda value: number(value, 1 if value < 10 else 0))
_MEMORY = _cost("peak GiB", lambda run: run.peak_gib, lambda value: number(value, 1))


@dataclass(frozen=True)
class Results:
    """A table of column headings and one row of cells per group; None: the group lacks the metric."""

    columns: list[str]
    rows: list[tuple[Group, list[Cell | None]]]


def results(section: Section) -> Results:
    """Return the table of the last evaluation and the cost, averaged over the finished runs of each group.

    If a group has no finished run, the mean is over its unfinished runs.
    """
    main = [section.main.name] if section.main else []
    present = [name for name in _COLUMNS if any(run.last(name) is not None for run in section.runs)]
    names = list(dict.fromkeys([*main, *present]))
    late = [name for name in names if name in _DETAILS and name not in main]
    early = [name for name in names if name not in late]
    costs = [_PACE, _MEMORY] if section.kind is Kind.rl else [_MEMORY]
    columns = [*map(_metric, early), _TIME, *map(_metric, late), *costs]
    rows = [(group, [read(group.measured) for _, read in columns]) for group in section.groups]
    return Results([heading for heading, _ in columns], rows)


def _metric(name: str) -> _Column:
    """Return the column of a metric."""
    return METRICS[name].heading, partial(metric_cell, metric=METRICS[name])


def metric_cell(runs: Sequence[Run], metric: Metric) -> Cell | None:
    """Return the cell of a metric; None if no run has a value."""
    known = [value for run in runs if (value := run.last(metric.name)) is not None]
    if not known:
        return None
    start = [run.first(metric.name) for run in runs if run.last(metric.name) is not None]
    before = [value for value in start if value is not None]
    alone = len(runs) == 1 and runs[0].evaluations
    interval = bounds(alone[-1], metric.name) if alone else None
    change = mean(before) if len(before) == len(known) else None  # both means are of the same runs
    return Cell(change, mean(known), (min(known), max(known)), interval, metric.text)


@dataclass(frozen=True)
class Settings:
    """The settings of a section.

    Attributes:
        shared: settings that all groups share, each as `key=value`; only those in `_SETTINGS`.
        keys: keys in which the groups differ.
        rows: one row per group: the value of each key, None if the group does not have the key.
    """

    shared: list[str]
    keys: list[str]
    rows: list[tuple[Group, list[str | None]]]

    @property
    def headings(self) -> list[str]:
        """The headings of the keys."""
        return headings(self.keys)


def settings(section: Section) -> Settings:
    """Return the settings of a section.

    Keys that only some algorithms have, with one value wherever they occur, are shown if they are in
    `_SETTINGS`.
    """
    configs = [group.config for group in section.groups]
    keys = []
    for key in differing(configs):
        present = {str(config[key]) for config in configs if key in config}
        if len(present) > 1 or key in _SETTINGS:
            keys.append(key)
    columns = [column(configs, key) for key in keys]
    shared = [
        pair(key, configs[0][key])
        for key in _SETTINGS
        if key not in keys and configs[0].get(key) not in (None, "none") and configs[0].get(key) != 0
    ]
    if all(group.label == joined(keys, row) for group, *row in zip(section.groups, *columns, strict=True)):
        keys, columns = [], []  # the labels contain all settings
    cells: list[list[Any]] = [list(row) for row in zip(*columns, strict=True)] or [[] for _ in configs]
    return Settings(shared, keys, list(zip(section.groups, cells, strict=True)))


def for_terminal(found: Results, width: int) -> Table:
    """Return the table for the terminal; groups without a finished run are dimmed.

    Args:
        found: the table.
        width: largest width in columns. Columns that do not fit are left out, from the right. Rows after
            the first `TERMINAL_ROWS` are left out, too.
    """
    label = min(TERMINAL_LABEL, max(len(group.label) for group, _ in found.rows))
    left = width - label - max(5, *(len(group.count) for group, _ in found.rows)) - 3 * TERMINAL_COLUMN
    shown: dict[int, int] = {}  # index of the column -> width
    for place, heading in enumerate(found.columns):
        texts = [each.final for _, cells in found.rows if (each := cells[place]) is not None]
        wide = max(map(len, [*texts, *heading.split(), heading[:8]]), default=0)
        if wide + TERMINAL_COLUMN <= left:
            shown[place] = wide
            left -= wide + TERMINAL_COLUMN
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", style="bold", width=label)
    table.add_column("seeds", min_width=5)
    for place, wide in shown.items():
        table.add_column(found.columns[place], justify="right", width=wide)
    for group, cells in found.rows[:TERMINAL_ROWS]:
        table.add_row(
            escape(group.label),
            group.count,
            *("" if (each := cells[place]) is None else each.final for place in shown),
            style=None if group.finished else "dim",
        )
    if len(found.rows) > TERMINAL_ROWS:
        table.caption = f"{len(found.rows) - TERMINAL_ROWS} more settings: see the page, or add --markdown"
    return table


def for_markdown(found: Results) -> str:
    """Return the table in Markdown."""
    rows = [["setting", "seeds", *found.columns]]
    for group, cells in found.rows:
        figures = ["" if each is None else str(each) for each in cells]
        rows.append([f"`{group.label}`", group.seeds, *figures])
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
