"""The declaration of a study: one YAML file with tasks, methods, axes, grids, seeds, tuning and claims.

Values of axes and tuned values are texts, as in the file (`studies/*.yaml`). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlhf.core.files import component

VALUE, LOSS, AT_KL, AT_TIME, COLLAPSED = "value", "loss", "at_kl", "at_time", "collapsed"
QUANTITIES = (VALUE, LOSS, AT_KL, AT_TIME, COLLAPSED)  # of tables and figures, beside names of metrics
Levels = Mapping[str, str]  # axis -> value
Grid = Mapping[str, tuple[str, ...]]  # "task", "method" or axis -> the values that are combined


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a study: its overrides, and how its runs are compared."""

    overrides: tuple[str, ...] = ()
    metric: str | None = None  # metric of an evaluation; None: the objective metric of the runs
    name: str = "value"  # name of the metric in tables
    at_kl: float | None = None  # KL to the reference (nats per response) at which gold scores are compared
    at_time: float | None = None  # virtual time (s) at which values are compared
    sign: int = 1  # 1: higher values are better; -1: lower ones (`better: lower`)
    worst: float = 0.0  # value of a run that diverged
    fall: float = 0.1  # a run whose last value is this much worse than its best value has collapsed


@dataclass(frozen=True)
class Method:
    """A method: its overrides, and the method that it is compared with, such as one without correction."""

    overrides: tuple[str, ...]
    base: str | None = None


@dataclass(frozen=True)
class Axis:
    """A setting that is varied."""

    values: Mapping[str, tuple[str, ...]]  # overrides of each value
    bases: Mapping[str, str]  # the value that each task has unless a grid varies the axis
    key: str | None  # config key of the axis; None if a value may be several overrides


@dataclass(frozen=True)
class Tune:
    """The choice of settings (usually a learning rate) for each task and method."""

    values: Mapping[str, tuple[str, ...]]  # the values that are compared, by config key
    seeds: tuple[int, ...]  # seeds of the runs for the choice; no table uses them
    at: Mapping[str, Levels]  # points of the choice by name: axis values, else the base of an axis
    reach: Mapping[str, Levels]  # from which axis values on a cell uses a point: the last one counts
    extend: int = 0  # how many more values are compared beyond an edge of the grid
    source: Spec | None = None  # the study whose choices are used; None: this study chooses
    check: bool = False  # with `source`, whether the neighbours of each chosen value are compared
    overrides: tuple[str, ...] = ()  # further overrides of the runs for the choice


class Table(NamedTuple):
    """A table or figure: a quantity of `QUANTITIES` or a metric, an axis ("": at the bases), and a title."""

    quantity: str
    axis: str
    title: str = ""

    @property
    def file_name(self) -> str:
        """The name of a file with the table, without suffix."""
        return component("_over_".join(filter(None, (self.quantity.replace("/", "_"), self.axis))))


@dataclass(frozen=True)
class Include:
    """Committed rows of another study: its cells, and the values of own axes that the other lacks."""

    spec: Spec
    grids: Sequence[Grid]
    levels: Levels


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A study file. Tasks, methods, axes and claims are in the order of the file."""

    file: Path
    name: str
    title: str  # of the page
    overrides: tuple[str, ...]  # of every run (`set`)
    repeat: tuple[str, ...]  # config keys that a seed sets
    seeds: tuple[int, ...]  # of the runs in tables
    tasks: Mapping[str, Task]
    methods: Mapping[str, Method]
    axes: Mapping[str, Axis]
    grids: Sequence[Grid]  # what is run; each grid is a product
    tune: Tune | None  # None: no setting is tuned
    tables: Sequence[Table]
    figures: Sequence[Table]
    claims: Mapping[str, str]  # sentence -> formula (see `rlhf.study.formula`)
    budget: Mapping[str, float]  # limits such as {"cpu_hours": 20}
    looks: int  # how often the claims are judged
    resources: Mapping[str, str]  # keys of the launcher
    include: Sequence[Include]  # rows of other studies
    config_dir: Path | None  # a folder with further options, as `--config-dir`
    page: Path  # a part between two marks is generated
    interval: str  # "t": mean and t interval; "percentile": interquartile mean and bootstrap interval
    margin: float | None  # a difference that matters: losses are tested against it, seeds counted for it
    analysis: str | None  # <file>.py:<function>, which gets the rows and returns Markdown for the page
    accept: tuple[int, ...]  # earlier results versions whose rows are used
    keep: tuple[str, ...]  # what is kept of run folders, such as "models"
    lines: Mapping[str, int] = field(repr=False)  # line of each dotted key, as "methods.ppo" or "grids.0"

    @property
    def folder(self) -> Path:
        """The folder of rows, page, figures and runs: that of study.yaml, else studies/<name>."""
        return folder_of(self.file, self.name)

    def at(self, key: str) -> str:
        """Return file, line and name of a key, for messages; the line may be that of the key around it."""
        line = self.lines.get(key) or self.lines.get(key.rpartition(".")[0])
        return f"{self.file}{line and f', line {line}' or ''}: {key}"

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.folder / "rows.jsonl"


def folder_of(file: Path, name: str) -> Path:
    """Return the folder of a study (see `Spec.folder`)."""
    if file.name == "study.yaml":
        return file.parent
    return (file.parent if file.parent.name == "studies" else file.parent / "studies") / name
