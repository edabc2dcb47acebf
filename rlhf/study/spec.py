"""The declaration of a study: one YAML file with tasks, methods, axes, grids, seeds, tuning and claims.

    study: staleness
    set: [model=pythia, eval.prompts=256]          # overrides of every run
    seeds: 10
    tasks: {arithmetic: {set: [task=arithmetic], metric: eval/gold_score, name: accuracy, at_kl: 0.5}}
    methods: {dpo: [algo=dpo], m2po: {set: [algo=m2po], base: dpo}}
    axes: {lag: {key: schedule.max_lag, values: [0, 64], base: 0}}
    grids: [{lag: all}]
    tables: [value over lag, loss over lag]
    claims: {dpo loses least: loss(dpo) < loss(m2po) at lag=64}

Values of axes and tuned values are texts, as in the file. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

VALUE, LOSS, AT_KL, COLLAPSED = "value", "loss", "at_kl", "collapsed"
QUANTITIES = (VALUE, LOSS, AT_KL, COLLAPSED)  # of tables and figures, beside names of metrics
Grid = Mapping[str, tuple[str, ...]]  # "task", "method" or axis -> the values that are combined


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a study.

    Attributes:
        overrides: overrides of every run of the task.
        metric: metric of an evaluation by which methods are compared; None: the objective metric of the runs.
        name: name of the metric in tables.
        at_kl: KL to the reference, in nats per response, at which gold scores are compared; None: none.
        worst: value of a run that diverged.
        fall: a run whose last value is this much below its best value has collapsed.
    """

    overrides: tuple[str, ...] = ()
    metric: str | None = None
    name: str = "value"
    at_kl: float | None = None
    worst: float = 0.0
    fall: float = 0.1


@dataclass(frozen=True)
class Method:
    """A method: its overrides, and the method that it is compared with, such as one without correction."""

    overrides: tuple[str, ...]
    base: str | None = None


@dataclass(frozen=True)
class Axis:
    """A setting that is varied.

    Attributes:
        values: overrides of each value.
        bases: the value that a task has unless a grid varies the axis.
        key: the config key of the axis; None if a value may be several overrides.
    """

    values: Mapping[str, tuple[str, ...]]
    bases: Mapping[str, str]
    key: str | None


@dataclass(frozen=True)
class Tune:
    """The choice of settings (usually a learning rate) for each task and method.

    Attributes:
        values: the values that are compared, by config key.
        seeds: seeds of the runs for the choice; no table uses them.
        at: points at which values are chosen: axis values by axis, by the name of the point. Axes that are
            not named have their base.
        reach: from which axis values on a cell uses a point. A cell uses the last point that it reaches.
        extend: how many more values are compared beyond an edge of the grid.
        source: the study whose choices are used; None: this study chooses.
        check: with `source`, whether the neighbours of each chosen value are compared.
    """

    values: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    at: Mapping[str, Mapping[str, str]]
    reach: Mapping[str, Mapping[str, str]]
    extend: int = 0
    source: Spec | None = None
    check: bool = False


class Table(NamedTuple):
    """A table or figure: a quantity (see `QUANTITIES`, or a metric) over an axis."""

    quantity: str
    axis: str

    def __str__(self) -> str:
        return f"{self.quantity} over {self.axis}"


@dataclass(frozen=True)
class Include:
    """Committed rows of another study: its cells, and the values of own axes that the other lacks."""

    spec: Spec
    grids: Sequence[Grid]
    levels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A study file.

    Attributes:
        file: the file.
        name: name of the study.
        title: title of the page.
        overrides: overrides of every run (`set`).
        repeat: config keys that a seed sets.
        seeds: seeds of the runs in tables.
        tasks, methods, axes: by name, in the order of the file.
        grids: what is run; each grid is a product.
        tune: the tuning; None: no setting is tuned.
        tables, figures: what the page shows.
        claims: formula of each claim, by its sentence.
        budget: limits such as {"cpu_hours": 20}.
        looks: how often the claims are judged.
        resources: keys of the launcher.
        include: rows of other studies.
        config_dir: a folder with further options, as `--config-dir`.
        page: the page; a part between two marks is generated.
        interval: "t": mean and t interval; "percentile": interquartile mean and bootstrap interval.
        analysis: a function that gets the rows and returns Markdown for the page, as <file.py>:<function>.
        accept: earlier results versions whose rows are used.
        keep: what is kept of run folders, such as "models".
        lines: line number of each dotted key of the file, as "methods.ppo" or "grids.0".
    """

    file: Path
    name: str
    title: str
    overrides: tuple[str, ...]
    repeat: tuple[str, ...]
    seeds: tuple[int, ...]
    tasks: Mapping[str, Task]
    methods: Mapping[str, Method]
    axes: Mapping[str, Axis]
    grids: Sequence[Grid]
    tune: Tune | None
    tables: Sequence[Table]
    figures: Sequence[Table]
    claims: Mapping[str, str]
    budget: Mapping[str, float]
    looks: int
    resources: Mapping[str, str]
    include: Sequence[Include]
    config_dir: Path | None
    page: Path
    interval: str
    analysis: str | None
    accept: tuple[int, ...]
    keep: tuple[str, ...]
    lines: Mapping[str, int] = field(repr=False)

    @property
    def folder(self) -> Path:
        """The folder of rows, page, figures and runs."""
        return folder_of(self.file, self.name)

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.folder / "rows.jsonl"


def folder_of(file: Path, name: str) -> Path:
    """Return the folder of a study: that of study.yaml, else studies/<name> beside the file."""
    if file.name == "study.yaml":
        return file.parent
    return (file.parent if file.parent.name == "studies" else file.parent / "studies") / name
