"""The declaration of a study: tasks, methods, axes, seeds, claims; its cells and its history."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.core import files
from rlhf.core.errors import UserError, one_line, place_in_code
from rlhf.usercode.address import load_function
from rlhf.words.catalogue import Override, read_overrides
from rlhf.words.mistakes import KNOWN, suggestion

# The declaration of a study: one YAML file with tasks, methods, axes, grids, seeds, tuning and claims.
#
# Values of axes and tuned values are texts, as in the file (`studies/*.yaml`).


class Quantity(StrEnum):
    """A quantity of tables and figures (the first five) and of claims, beside names of metrics."""

    VALUE = "value"
    LOSS = "loss"
    AT_KL = "at_kl"
    AT_TIME = "at_time"
    COLLAPSED = "collapsed"
    SLOPE = "slope"
    START = "start"  # the value before training


_QUANTITIES = tuple(Quantity)[:5]
_Levels = Mapping[str, str]  # axis -> value
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


class Method(NamedTuple):
    """A method: its overrides, and the method that it is compared with, such as one without correction."""

    overrides: tuple[str, ...]
    base: str | None = None


class Axis(NamedTuple):
    """A setting that is varied."""

    values: Mapping[str, tuple[str, ...]]  # overrides of each value
    bases: Mapping[str, str]  # the value that each task has unless a grid varies the axis
    key: str | None  # config key of the axis; None if a value may be several overrides


@dataclass(frozen=True)
class Tune:
    """The choice of settings (usually a learning rate) for each task and method."""

    values: Mapping[str, tuple[str, ...]]  # the values that are compared, by config key
    seeds: tuple[int, ...]  # seeds of the runs for the choice; no table uses them
    at: Mapping[str, _Levels]  # points of the choice by name: axis values, else the base of an axis
    reach: Mapping[str, _Levels]  # from which axis values on a cell uses a point: the last one counts
    extend: int = 0  # how many more values are compared beyond an edge of the grid
    source: Spec | None = None  # the study whose choices are used; None: this study chooses
    check: bool = False  # with `source`, whether the neighbours of each chosen value are compared
    overrides: tuple[str, ...] = ()  # further overrides of the runs for the choice


class Table(NamedTuple):
    """A table or figure: a quantity of `_QUANTITIES` or a metric, an axis ("": at the bases), and a title."""

    quantity: str
    axis: str
    title: str = ""

    @property
    def file_name(self) -> str:
        """The name of a file with the table, without suffix."""
        return files.component("_over_".join(filter(None, (self.quantity.replace("/", "_"), self.axis))))

    @staticmethod
    def read(text: str, tasks: Mapping[str, Task], axes: Collection[str]) -> Table | str:
        """Return the table of a text such as "loss over lag as the loss"; else what is wrong.

        Args:
            text: the text.
            tasks: the tasks, which determine the quantities that runs have, beside metrics.
            axes: the axes.
        """
        known = _quantities(tasks)
        said, _, title = text.partition(" as ")
        quantity, over, axis = said.partition(" over ")
        quantity = quantity.removeprefix("value ").strip()
        if quantity not in known and "/" not in quantity:
            guess = suggestion(quantity, [*known, *KNOWN], "did you mean {}?") or "write value over <axis>"
            remedy = f"add tasks.<name>.{quantity}" if quantity in _QUANTITIES else guess
            return f"must be <quantity> over <axis> ({', '.join(known)}, or a metric), got {text}; {remedy}"
        if quantity == Quantity.LOSS and not over:
            return f"must be over an axis, got {text}; write {Quantity.LOSS} over <axis>"
        if over and axis not in axes:
            guess = suggestion(axis, axes, "did you mean {}?") or "choose one of them"
            return f"must be over an axis ({', '.join(axes) or 'there are none'}), got {axis}; {guess}"
        return Table(quantity, axis, title)


class Include(NamedTuple):
    """Committed rows of another study: its cells, and the values of own axes that the other lacks."""

    spec: Spec
    grids: Sequence[Grid]
    levels: _Levels


class Cell(NamedTuple):
    """Settings whose runs differ only in the seed: a task, a method, and a value of each axis.

    `levels` has a pair (axis, value) for each axis of the study, in the order of the file.
    """

    task: str
    method: str
    levels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.task, self.method, *(f"{axis}={value}" for axis, value in self.levels)])

    def at(self, levels: Mapping[str, str], method: str | None = None) -> Cell:
        """Return the cell with other values of some axes, or another method."""
        changed = tuple((axis, levels.get(axis, value)) for axis, value in self.levels)
        return Cell(self.task, method or self.method, changed)


TABLE, TUNE = "table", "tune"  # parts of a study
Tuned = tuple[tuple[str, str], ...]  # value of each tuned key


class Run(NamedTuple):
    """A run of a study: a cell, a seed, the value of each tuned key, and the part (table or tune)."""

    cell: Cell
    seed: int
    tuned: Tuned
    part: str

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.tuned] if self.part == TUNE else []
        return " ".join([str(self.cell), *shown, f"seed {self.seed}"])

    def names(self) -> dict[str, Any]:
        """Return the fields of a row that name its run."""
        names = {**self.cell._asdict(), "levels": dict(self.cell.levels)}
        return {**names, "seed": self.seed, "part": self.part, "tuned": dict(self.tuned)}


_LOOK, CLAIMS = "look", "claims"  # kinds of events of history.jsonl


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A study file, with its cells, the overrides of its runs, and its history (history.jsonl).

    Tasks, methods, axes and claims are in the order of the file. The history has looks at the claims, the
    claims when the runs started, and other events.
    """

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
    curves: bool  # whether gold and proxy scores are shown over the KL to the initial policy
    claims: Mapping[str, str]  # sentence -> formula (see `rlhf.study.spec`)
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
    keep: tuple[str, ...]  # what is kept of run folders: "models"
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

    def cell(self, task: str, method: str, levels: Mapping[str, str]) -> Cell:
        """Return a cell; an axis without a value has the base of the task."""
        bases = ((axis, declared.bases.get(task, "")) for axis, declared in self.axes.items())
        return Cell(task, method, tuple((axis, levels.get(axis, base)) for axis, base in bases))

    def cells(self, grids: Sequence[Grid] | None = None) -> list[Cell]:
        """Return the cells of grids (None: those of the study), each once, in the order of the grids."""
        every = {"task": tuple(self.tasks), "method": tuple(self.methods)}
        whole = [{**every, **grid} for grid in (self.grids if grids is None else grids)]
        found = (dict(zip(grid, x, strict=True)) for grid in whole for x in product(*grid.values()))
        return list(dict.fromkeys(self.cell(each["task"], each["method"], each) for each in found))

    def _typed(self, run: Run) -> list[tuple[str, Override]]:
        """Return the overrides of a run with the keys of the study file they come from; a later one wins."""
        cell = run.cell
        layers: list[tuple[str, Sequence[str]]] = [
            ("set", self.overrides),
            (f"tasks.{cell.task}", self.tasks[cell.task].overrides),
            (f"methods.{cell.method}", self.methods[cell.method].overrides),
            *((f"axes.{axis}", self.axes[axis].values[value]) for axis, value in cell.levels),
            ("tune.set", self.tune.overrides if self.tune and run.seed in self.tune.seeds else ()),
            *((f"tune.{key}", [f"{key}={value}"]) for key, value in run.tuned),
            ("repeat", [f"{key}={run.seed}" for key in self.repeat]),
        ]
        return [(name, each) for name, texts in layers for each in read_overrides(texts)]

    def overrides_of(self, run: Run) -> list[str]:
        """Return the overrides of a run, each key once, without those of the machine, as paths."""
        return list({each.key: each.text for _, each in self._typed(run)}.values())

    def origin(self, run: Run, key: str) -> str:
        """Return the key of the study file from which a run has a config key, or that of its method."""
        found = [name for name, each in self._typed(run) if each.key == key]
        return key if key in self.lines else [f"methods.{run.cell.method}", *found][-1]

    def set_twice(self) -> dict[str, list[str]]:
        """Return the config keys that several keys of the study file set: config key -> keys of the file."""
        found: dict[str, dict[str, None]] = {}
        tuned = tuple((key, "") for key in self.tune.values) if self.tune else ()
        for cell in self.cells():
            typed = self._typed(Run(cell, 0, tuned, TABLE))
            several = Counter(each.key for _, each in typed)
            for name, each in typed:
                if several[each.key] > 1:
                    found.setdefault(each.key, {})[name] = None
        return {key: list(names) for key, names in found.items()}

    def tuning_point(self, cell: Cell) -> str:
        """Return the name of the point of `tune.at` whose choice a cell uses: the last one that it reaches.

        A cell reaches a point if one of its values is at least that of `reach`; numbers are compared as
        numbers, and other values by their place in the file. The point `a+b` is for cells that reach both.
        """
        assert self.tune is not None

        def rank(axis: str, value: str) -> float:
            try:
                return float(value)
            except ValueError:
                return list(self.axes[axis].values).index(value)

        levels = dict(cell.levels)
        reached = [
            point
            for point, limits in self.tune.reach.items()
            if any(rank(axis, levels[axis]) >= rank(axis, least) for axis, least in limits.items())
        ]
        both = "+".join(reached)
        return both if both in self.tune.at else [next(iter(self.tune.at)), *reached][-1]

    def tuning_cell(self, cell: Cell) -> Cell:
        """Return the cell of the runs that choose the tuned values of a cell."""
        assert self.tune is not None
        return self.cell(cell.task, cell.method, self.tune.at[self.tuning_point(cell)])

    def call(self, key: str, address: str, rows: Sequence[object]) -> Any:
        """Return what a function of the user, <file>.py:<function> or <module>:<function>, returns for rows.

        Args:
            key: the key of the address.
            address: the function; the path of a file is relative to the folder of the study file.
            rows: the rows of a study.

        Raises:
            UserError: there is no such function, or it failed.
        """
        at = str(self.file.parent / address) if ".py:" in address else address
        try:
            return load_function(key, at, None)(rows)
        except (Exception, SystemExit) as error:
            got = f"{one_line(error)}{place_in_code(error, __file__)}"
            rule = f"{self.at(key)} must be a function of rows"
            raise UserError(f"{rule}, got {got}; correct {address}") from None

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, in the order of time."""
        every = files.read_lines(self.folder / "history.jsonl", ["kind", "time"])
        return [event for event in every if event["kind"] == kind]

    def record(self, kind: str, **content: object) -> None:
        """Append an event with its time (UTC)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        time = datetime.now(UTC).isoformat(timespec="seconds")
        files.append(self.folder / "history.jsonl", [{"kind": kind, "time": time, **content}])

    def record_claims(self) -> None:
        """Record the claims when the first run of a table starts, unless an earlier call has done so."""
        if not self.events(CLAIMS):
            self.record(CLAIMS, claims=dict(self.claims))

    def added_later(self) -> set[str]:
        """Return the sentences of claims that were added or changed after the runs started."""
        first = [event["claims"] for event in self.events(CLAIMS)][:1]
        return {s for s, text in self.claims.items() if first and first[0].get(s) != text}

    def look(self, rows: object) -> int:
        """Record a look at the claims if something changed since the last one; return the number of looks."""
        seen, mark = self.events(_LOOK), files.digest([rows, dict(self.claims)])
        if seen and seen[-1]["rows"] == mark:
            return len(seen)
        self.record(_LOOK, rows=mark, seeds=len(self.seeds))
        return len(seen) + 1


def folder_of(file: Path, name: str) -> Path:
    """Return the folder of a study (see `Spec.folder`)."""
    if file.name == "study.yaml":
        return file.parent
    return (file.parent if file.parent.name == "studies" else file.parent / "studies") / name


# The grammar of claims, and that of tables.
#
#     quantity(methods) < | > number | [factor *] quantity(methods)
#     quantity(methods) within margin [of quantity(methods)]
#
# After a side: `at axis=value ...`, `at every axis`, `over axis` (for slopes). At the end: `pooled` (the mean
# over the tasks, in place of a verdict for each task). A side without such words has those of the other side.
#
# Quantities are value, loss (the base of the first named axis minus the cell), slope (per doubling of the
# axis), at_kl, collapsed, and names of metrics. A claim holds if it holds for every method on the left and on
# the right. `same` stands for the method on the left, and `best` for the method with the highest value.
#
# A claim that the grammar cannot express is a Python function, `<file>.py:<function>`. The function gets the
# rows and returns {name: one difference per seed}. The claim holds if all means are above 0.


SAME, BEST = "same", "best"
_SIDE = re.compile(r"(?P<quantity>[\w/]+)\((?P<methods>[^()]*)\)(?P<words>[^<>()*]*)")
_WORDS = re.compile(
    r"(?<!\S)(?:over (?P<over>\S+)|at every (?P<every>\S+)|(?:at )?(?P<axis>[^\s=]+)=(?P<value>\S*))"
)
_NUMBER = re.compile(r"(-?\d+\.?\d*(?:e-?\d+)?)(?: (\*|of)(?= ))?")
_POSITIVE = re.compile(r"(?!0*\.?0*$)\d+\.?\d*(e-?\d+)?")
_FUNCTION = re.compile(r"\S+:\w+")


@dataclass(frozen=True)
class Operand:
    """One side of a claim: a quantity of methods in a cell."""

    quantity: str
    methods: tuple[str, ...]  # names of methods, `SAME` or `BEST`
    levels: Mapping[str, str] = field(default_factory=dict)  # value of each named axis
    every: tuple[str, ...] = ()  # axes for each of whose values the claim is made
    over: str = ""  # the axis of a slope


@dataclass(frozen=True)
class Formula:
    """A claim: left < or > number + factor * right, or |left - right| < number."""

    text: str  # as in the file
    left: Operand | None = None  # None: the claim is a function
    sign: str = ""  # "<", ">" or "within"
    number: float = 0.0  # or the margin of `within`
    factor: float = 1.0
    right: Operand | None = None
    pooled: bool = False  # whether the quantities are means over the tasks

    @staticmethod
    def read(text: str) -> Formula | None:
        """Return a claim; None if the text is not of the grammar."""
        if _FUNCTION.fullmatch(text):
            return Formula(text)
        words, pooled = re.subn(r" pooled$", "", text)
        first, sign, second = (re.split(r" (<|>|within) ", words, maxsplit=1) + ["", ""])[:3]
        found = _NUMBER.match(second)
        number, link = (float(found[1]), found[2]) if found else (0.0, "")
        rest = second[found.end() :] if found else second
        if link not in ((None, "of") if sign == "within" else (None, "", "*")):
            return None
        left = _side(first + rest if link is None else first)  # words after a number alone are of this side
        right = _side(rest.strip())
        if left is None or (right is None and link is not None):
            return None
        if right is not None:
            left, right = _placed(left, right), _placed(right, left)
        factor, number = (number, 0.0) if link == "*" else (1.0, number)
        return Formula(text, left, sign, number, factor, right, bool(pooled))

    def problems(
        self, methods: Iterable[str], axes: Mapping[str, Axis], tasks: Mapping[str, Task] | None = None
    ) -> Iterator[str]:
        """Yield what is wrong with the names of a claim: a rule for each problem."""
        known, quantities = [*methods, SAME, BEST], [*_quantities(tasks or {}), Quantity.SLOPE]
        sides = [side for side in (self.left, self.right) if side is not None]
        if any(BEST in side.methods for side in sides) and (
            len(sides[0].methods) > 1 or sides[0].every or sides[1:]
        ):
            yield f"compare {BEST} with a number"
        if sides and SAME in sides[0].methods:
            yield f"have {SAME} on the right only"
        if sides[1:] and len(sides[0].methods) == len({(side.quantity, side.methods) for side in sides}) == 1:
            yield f"compare different methods or quantities, or {SAME} at other values"
        for side in sides:
            named = [*side.levels, *side.every, *filter(None, [side.over])]
            said = [("methods", m, known) for m in side.methods] + [("axes", axis, [*axes]) for axis in named]
            said += [(f"a value of {a}", v, [*axes[a].values]) for a, v in side.levels.items() if a in axes]
            for what, name, names in said:
                if name not in names:
                    guess = suggestion(name, names, " (did you mean {}?)")
                    yield f"name {what} ({', '.join(names) or 'there are none'}), not {name}{guess}"
            if side.quantity not in quantities and "/" not in side.quantity:
                why = suggestion(side.quantity, [*quantities, *KNOWN], " (did you mean {}?)")
                why = f" (add tasks.<name>.{side.quantity})" if side.quantity in _QUANTITIES else why
                yield f"be about {', '.join(quantities)} or a metric, not {side.quantity}{why}"
            if (side.quantity == Quantity.SLOPE) != bool(side.over):
                yield f"have 'over <axis>' after {Quantity.SLOPE}, and nowhere else"
            if side.over in axes and not all(map(_POSITIVE.fullmatch, axes[side.over].values)):
                yield f"have a slope over an axis of positive numbers, not {side.over}"
            if side.quantity == Quantity.LOSS and not side.levels and not side.every:
                yield "say at which value of an axis a loss is meant, as 'at lag=64'"
            axis, value = next(iter(side.levels.items()), ("", ""))
            if side.quantity == Quantity.LOSS and axis in axes and {*axes[axis].bases.values()} == {value}:
                yield f"be about a loss at another value than the base ({axis}={value})"


def _side(text: str) -> Operand | None:
    found = _SIDE.fullmatch(text)
    if found is None or _WORDS.sub("", found["words"]).strip():
        return None
    methods = tuple(filter(None, re.split(r"[\s,]+", found["methods"])))
    words = [*_WORDS.finditer(found["words"])]
    levels = {each["axis"]: each["value"] for each in words if each["axis"]}
    if len(levels) < sum(bool(each["axis"]) for each in words):  # an axis twice
        return None
    every = tuple(each["every"] for each in words if each["every"])
    over = next((each["over"] for each in words if each["over"]), "")
    return Operand(found["quantity"], methods, levels, every, over) if methods else None


def _placed(side: Operand, other: Operand) -> Operand:
    """Return a side with the axes of the other side, if the side names none."""
    if side.levels or side.every or side.over:
        return side
    return replace(side, levels=other.levels, every=other.every, over=other.over)


def _quantities(tasks: Mapping[str, Task]) -> list[str]:
    """Return the quantities that the runs of tasks have: at_kl and at_time need the key of a task."""
    declared = tasks.values() or [Task(at_kl=1, at_time=1)]
    return [each for each in _QUANTITIES if any(getattr(task, each, 0) is not None for task in declared)]
