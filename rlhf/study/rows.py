"""The rows of a study, their sums with intervals and tests, and the verdicts on claims."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from rlhf.core import statistics
from rlhf.core.errors import UserError
from rlhf.core.files import as_line, read_lines, write_atomically
from rlhf.core.formatting import shortened
from rlhf.core.statistics import LEVEL, Estimate, Side, distinct, holm
from rlhf.report.runs import finite
from rlhf.study.spec import BEST, SAME, TABLE, Cell, Formula, Operand, Quantity, Spec, Task

# rows.jsonl: the results of a study, one row a run. Tables, figures and claims are made of it alone.


FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run, with the names that the study file had when the file of rows was written."""

    run: str  # identity: digest of the settings that results depend on (`rlhf.words.compose.digest`)
    inputs: Mapping[str, str]  # digests of what the settings name: data, model folders, source of plug-ins
    results: int  # results version of the project; 0: unknown
    task: str
    method: str
    levels: Mapping[str, str]  # value of each axis
    seed: int  # value of the keys that a seed sets
    part: str  # `TABLE` or `TUNE`
    tuned: Mapping[str, str]  # value of each tuned key
    status: str  # `FINISHED`; `DIVERGED`: a loss was not finite; `FAILED`: another error
    error: str | None  # the first line of the error
    metric: str  # the objective metric
    metrics: Mapping[str, float] = field(default_factory=dict)  # all metrics of the last evaluation
    # "update" and chosen metrics, a value per evaluation
    evaluations: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    # training metrics, mean over the last quarter of the updates
    means: Mapping[str, float] = field(default_factory=dict)
    prompts: int = 0  # held-out prompts of the last evaluation; 0: unknown
    bits: str | None = None  # one bit per held-out prompt (see `packed`); None: scores are not binary
    cpu_s: float = 0.0  # CPU seconds, without the models that runs share
    gpu_s: float = 0.0
    memory_gb: float | None = None  # peak memory in 10^9 bytes; None: not measured
    machine: str = ""  # machine class: processor, instruction set, GPU, threads, libraries; "": unknown
    # digest of each stage model (SFT, pairs, reward model)
    models: Mapping[str, str] = field(default_factory=dict)
    versions: str = ""  # commit, with "+ changes" if files were changed; version of torch

    @property
    def outcomes(self) -> np.ndarray | None:
        """The outcomes [prompts] as booleans; None if the row has no bits."""
        if self.bits is None:
            return None
        bits = np.frombuffer(base64.b64decode(self.bits), np.uint8)
        return np.unpackbits(bits, count=self.prompts).astype(bool)


_FIELDS = get_type_hints(Row)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value of a JSON file has the type `hint`; numbers are finite."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, each) for each in inner)
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if kind is Sequence:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    return finite(value) if hint is float else isinstance(value, hint)


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file; no rows if the file does not exist. Keys of later versions are ignored.

    Raises:
        UserError: the file cannot be read, or a line is not a row; the error names the line.
    """
    rows = read_lines(file, tuple(_FIELDS))
    for row in rows:
        wrong = [name for name, hint in _FIELDS.items() if not _fits(row[name], hint)]
        if wrong or row["status"] not in (FINISHED, DIVERGED, FAILED):
            rule = f"{file} must have {', '.join(wrong) or 'status'} as studies write them"
            raise UserError(f"{rule}, got others in run {row['run']}; restore the file, or delete the line")
    return [Row(**{name: row[name] for name in _FIELDS}) for row in rows]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows in place of a file, whole and sorted by part, cell, tuned values and seed.

    Values of axes that are numbers are sorted as numbers, and before texts.
    """

    def number(text: str) -> tuple[float, str]:
        return (float(text), "") if re.fullmatch(r"-?\d+\.?\d*(e-?\d+)?", text) else (math.inf, text)

    def order(row: Row) -> tuple:
        levels = [(axis, number(value)) for axis, value in row.levels.items()]
        return row.part, row.task, row.method, levels, sorted(row.tuned.items()), row.seed, row.run

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(as_line(asdict(row)) for row in sorted(rows, key=order)))


def packed(outcomes: Sequence[bool]) -> str:
    """Return one bit per prompt as base64 (256 prompts: 44 characters)."""
    return base64.b64encode(np.packbits(np.asarray(outcomes, bool)).tobytes()).decode()


# The rows of a study as values per cell and seed, and sums of cells with intervals and tests.


FEWEST = 3  # seeds without which nothing is stated
_OTHER: Mapping[Side, Side] = {"greater": "less", "less": "greater"}


class Term(NamedTuple):
    """A part of a sum: a weight, a cell, and a quantity: value, at_kl, at_time, collapsed or a metric."""

    weight: float
    cell: Cell
    quantity: str


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of cells, such as a difference or a slope."""

    samples: np.ndarray  # [cells, seeds]; nan: the seed has no value
    weights: Sequence[float]
    paired: bool  # whether the seeds of the cells share models and machine; else means are compared
    collapsed: int = 0  # number of collapsed runs in the cells
    doubtful: Collection[Side] = ()  # sides on which a collapsed cell would be called better

    @cached_property
    def values(self) -> np.ndarray:
        """The sum within each seed that all cells have."""
        return (each := np.asarray(self.weights) @ self.samples)[~np.isnan(each)]

    @cached_property
    def apart(self) -> list[np.ndarray]:
        """The values of each cell."""
        return [each[~np.isnan(each)] for each in self.samples]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.values) if self.paired else min(map(len, self.apart))

    @cached_property
    def estimate(self) -> Estimate:
        """The mean with its 95 % t interval; of fewer than `FEWEST` seeds with minimum and maximum."""
        if not self.seeds:
            return Estimate(math.nan, math.nan, math.nan, 0)
        if not self.paired:
            return statistics.unpaired(self.apart, self.weights)[0]
        x = self.values
        few = Estimate(float(x.mean()), float(x.min()), float(x.max()), len(x))
        return few if len(x) < FEWEST else statistics.mean_interval(x)

    @property
    def sd(self) -> float:
        """The standard deviation of one seed."""
        if self.paired:
            return float(self.values.std(ddof=1))
        return math.hypot(*(w * x.std(ddof=1) for w, x in zip(self.weights, self.apart, strict=True)))

    def p(self, limit: float = 0.0, side: Side = "two-sided", family: int = 1, level: float = LEVEL) -> float:
        """Return the p-value against a limit (see `statistics.p_value`)."""
        if self.paired:
            return statistics.p_value(self.values, limit, side, family, level)
        return statistics.unpaired(self.apart, self.weights, limit, side)[1]

    def unsure(self, side: Side, family: int, level: float) -> bool:
        """Return whether a t test cannot decide for a side, and the sign-flip test cannot either.

        A t test is wrong too often if it calls a cell better in which runs collapse now and then. If it calls
        such a cell worse, it is wrong less often than `level` (simulated in the tests).
        """
        unable = not self.paired or statistics.smallest_p(self.seeds) * family > level
        return unable and (side in self.doubtful if side != "two-sided" else bool(self.doubtful))

    def __neg__(self) -> Contrast:
        doubtful = [_OTHER[side] for side in self.doubtful]
        return replace(self, weights=[-weight for weight in self.weights], doubtful=doubtful)


class Results:
    """The rows of a study.

    Args:
        spec: the study.
        rows: its rows; rows of tuning and of cells that are not in the grids are not used.
        included: the rows of each study of `spec.include`, in the same order. All rows of a cell are of one
            study, complete or not: of this one if its grids have the cell, else of the first one with it.

    Attributes:
        cells: the rows of tables by cell and seed; runs that failed are not among them.
        failed: the rows of runs that failed.
        level: the probability of a false statement at one of the looks of the study.
        expected: number of runs of the own grids.
        missing: how many of these have no row.
    """

    def __init__(self, spec: Spec, rows: Iterable[Row], included: Sequence[Iterable[Row]] = ()) -> None:
        self.spec = spec
        self.cells: dict[Cell, dict[int, Row]] = {}
        self.failed: list[Row] = []
        self.level = LEVEL / spec.looks
        self.lacking: Counter[Cell] = Counter()  # how many runs of a cell failed
        self.seeds: dict[Cell, int] = {}  # how many seeds a complete cell has
        own = spec.cells()
        self.expected = len(own) * len(spec.seeds)
        self._add(spec, own, (row for row in rows if row.seed in spec.seeds), {})
        self.missing = self.expected - sum(map(len, self.cells.values())) - len(self.failed)
        for each, found in zip(spec.include, included, strict=False):
            self._add(each.spec, each.spec.cells(each.grids), found, each.levels)

    @classmethod
    def read(cls, spec: Spec) -> Results:
        """Return the results in the files of a study and of those that it includes.

        Raises:
            UserError: a line of a file is not a row.
        """
        return cls(spec, read_rows(spec.rows), [read_rows(each.spec.rows) for each in spec.include])

    def _add(self, spec: Spec, wanted: Iterable[Cell], rows: Iterable[Row], more: Mapping[str, str]) -> None:
        """Add the rows of some cells of a study; `more`: values of axes that the study lacks."""
        known = (cell for cell in wanted if cell.task in self.spec.tasks and cell.method in self.spec.methods)
        own = {c: self.spec.cell(c.task, c.method, {**dict(c.levels), **more}) for c in known}
        own = {cell: shown for cell, shown in own.items() if shown not in self.seeds}
        self.seeds |= dict.fromkeys(own.values(), len(spec.seeds))
        for row in rows:
            cell = spec.cell(row.task, row.method, row.levels)
            if row.part != TABLE or cell not in own or not row.levels.keys() <= spec.axes.keys():
                continue
            if row.status == FAILED:
                self.failed.append(row)
                self.lacking[own[cell]] += 1
            else:
                self.cells.setdefault(own[cell], {}).setdefault(row.seed, row)

    @property
    def rows(self) -> list[Row]:
        """All rows of tables."""
        return [row for found in self.cells.values() for row in found.values()]

    def measured(self, cell: Cell, quantity: str) -> dict[int, float]:
        """Return value, at_kl, at_time, collapsed or a metric of each seed of a cell that has it."""
        task, exact = self.spec.tasks[cell.task], self.spec.interval != "percentile"
        rows = sorted(self.cells.get(cell, {}).items())
        found = ((seed, _measured(row, task, quantity, exact)) for seed, row in rows)
        return {seed: value for seed, value in found if value is not None}

    def collapsed(self, cell: Cell) -> int:
        """Return the number of collapsed runs of a cell."""
        return int(sum(self.measured(cell, Quantity.COLLAPSED).values()))

    def terms(self, quantity: str, cell: Cell, axis: str = "") -> list[Term]:
        """Return a quantity of tables, a slope or a metric as a sum of cells; `axis`: of loss or slope."""
        if quantity == Quantity.LOSS:
            base = cell.at({axis: self.spec.axes[axis].bases[cell.task]})
            sign = self.spec.tasks[cell.task].sign
            return [Term(sign, base, Quantity.VALUE), Term(-sign, cell, Quantity.VALUE)]
        if quantity == Quantity.SLOPE:
            levels = list(self.spec.axes[axis].values)
            x = np.log2(np.asarray(levels, float))
            weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
            pairs = zip(weights, levels, strict=True)
            return [Term(w, cell.at({axis: level}), Quantity.VALUE) for w, level in pairs]
        return [Term(1.0, cell, quantity)]

    def contrast(self, terms: Sequence[Term]) -> Contrast:
        """Return a weighted sum of cells; it is paired if the seeds have equal models and machine classes."""
        found = [self.measured(term.cell, term.quantity) for term in terms]
        seeds = sorted({seed for values in found for seed in values})
        samples = np.array([[values.get(seed, math.nan) for seed in seeds] for values in found])
        rows = [self.cells.get(term.cell, {}) for term in terms]
        paired = all(
            len({(each[seed].task, each[seed].machine, *sorted(each[seed].models.items())) for each in rows})
            == len({term.cell.task for term in terms})
            for seed in set.intersection(*map(set, found))
        )
        fallen = {term.cell: self.collapsed(term.cell) for term in terms}
        doubtful: set[Side] = set()
        for weight, cell, quantity in (term for term in terms if fallen[term.cell]):
            # in which direction the quantity is better
            known = quantity in (Quantity.VALUE, Quantity.AT_KL, Quantity.AT_TIME)
            up = weight * self.spec.tasks[cell.task].sign > 0
            doubtful |= {"greater" if up else "less"} if known else {"greater", "less"}
        return Contrast(samples, [term.weight for term in terms], paired, sum(fallen.values()), doubtful)

    def complete(self, terms: Iterable[Term]) -> bool:
        """Return whether all seeds of the cells have values."""
        return all(len(self.measured(t.cell, t.quantity)) >= self.seeds.get(t.cell, 1) for t in terms)

    def table(self, cell: Cell) -> np.ndarray | None:
        """Return the values [methods, seeds] of the column of a cell; None if values are missing."""
        methods = self.spec.methods
        column = self.contrast([Term(1.0, cell.at({}, method), Quantity.VALUE) for method in methods])
        whole = ~np.isnan(column.samples).any(axis=0)
        few = min(map(len, column.apart)) < len(self.spec.seeds) or sum(whole) < 2
        return None if few else column.samples[:, whole]


def _measured(row: Row, task: Task, quantity: str, exact: bool) -> float | None:
    """Return a quantity of a run; None if the run does not have it."""
    metric = task.metric or row.metric
    if quantity == Quantity.COLLAPSED:
        values = [task.sign * value for value in row.evaluations.get(metric, ()) if value is not None]
        fallen = bool(values) and values[-1] <= max(values) - task.fall + 1e-9
        return float(row.status == DIVERGED or fallen)
    if quantity in (Quantity.AT_KL, Quantity.AT_TIME):
        names, x, power = ("rollouts/time_s", metric), task.at_time, 1.0
        if quantity == Quantity.AT_KL:
            names, x, power = ("eval/kl", "eval/gold_score"), task.at_kl, 0.5
        points = (row.evaluations.get(name, ()) for name in names)
        return None if x is None else _value_at(zip(*points, strict=False), x, power)
    if quantity == Quantity.START:
        first = [row.evaluations.get(name, ()) for name in ("update", metric)]
        return first[1][0] if all(first) and first[0][0] == 0 else None
    if quantity != Quantity.VALUE:
        return row.metrics.get(quantity, row.means.get(quantity))
    value = task.worst if row.status == DIVERGED else row.metrics.get(metric)
    if value is not None and exact and row.prompts:
        # Early rows have six decimals, whose rounding would be a spread of equal differences: a rate is a
        # multiple of half a prompt (a tie).
        rate = round(value * 2 * row.prompts) / (2 * row.prompts)
        return rate if abs(rate - value) < 1e-6 else value
    return value


def _value_at(points: Iterable[tuple[float | None, float | None]], at: float, power: float) -> float | None:
    """Return y at a value of x, interpolated where x first rises to it; None if x stays below.

    The interpolation is linear in x to the `power`. Gold scores are close to linear in the square root of the
    KL while they rise (Gao et al., 2210.10760). `points`: (x, y) of the evaluations in the order of updates.
    """
    known = [(x, y) for x, y in points if x is not None and y is not None]
    for (before, low), (after, high) in zip(known, known[1:], strict=False):
        if before <= at <= after and before < after:
            start, end = max(0.0, before) ** power, after**power
            return low + (high - low) * (at**power - start) / (end - start)
    return None


# Metrics that tables, figures and claims may name: those of docs/reference/metrics.md that rows keep.


def named(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the metrics that a study names: key of the study file, name."""
    formulas = {f"claims.{said}": Formula.read(text) for said, text in spec.claims.items()}
    found = [(f"tasks.{name}.metric", task.metric) for name, task in spec.tasks.items()]
    found += [(f"tables.{place}", each.quantity) for place, each in enumerate(spec.tables)]
    found += [(f"figures.{place}", each.quantity) for place, each in enumerate(spec.figures)]
    found += [("curves", name) for name in ("eval/kl", "eval/gold_score") if spec.curves]
    sides = ((key, side) for key, each in formulas.items() if each for side in (each.left, each.right))
    found += [(key, side.quantity) for key, side in sides if side]
    yield from ((key, name) for key, name in found if name and "/" in name)


# Verdicts on the claims of a study. There are none while runs are missing.


_ELSEWHERE = "no grid of the task has such a cell"
_HOLDS, _NOT, UNDECIDED = "holds", "does not hold", "undecided"
_MANY = 1000  # more seeds are not counted


class Judged(NamedTuple):
    """A claim with its verdict, the numbers that the verdict is made of, and its task; None: all tasks."""

    said: str
    formula: str
    task: str | None
    verdict: str
    numbers: str
    contrasts: Mapping[str, Contrast] = {}  # the differences that it is about, of all seeds

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds; None if this is not decided."""
        return True if self.verdict.startswith(_HOLDS) else False if self.verdict == _NOT else None


def judged(results: Results) -> Iterator[Judged]:
    """Yield the claims with their verdicts: for each task whose grids have the cells, or for all together."""
    for said, text in results.spec.claims.items():
        formula = Formula.read(text)
        assert formula is not None
        together = formula.pooled or formula.left is None
        for tasks in [[*results.spec.tasks]] if together else [[task] for task in results.spec.tasks]:
            verdict, numbers, about = _verdict(results, formula, tasks, f"claims.{said}")
            if verdict != _ELSEWHERE:
                yield Judged(said, text, None if together else tasks[0], verdict, numbers, about)


def decided(
    contrasts: Mapping[str, Contrast], limit: float, level: float, *, chosen: str = "", within: bool = False
) -> str:
    """Return the verdict on the claim that every contrast is above a limit.

    The claim holds if every one-sided p-value is below `level` / 2. All have to be small, so this needs no
    correction (intersection-union test). It does not hold if the smallest Holm p-value of the other side is
    below `level` / 2. What a collapsed run makes doubtful (see `Contrast.unsure`) is not decided.

    Args:
        contrasts: the contrasts by name.
        limit: the limit.
        level: probability of a false verdict.
        chosen: the contrast of the best method: the claim is about this one, and corrected for all, because
            the same seeds have chosen the method.
        within: whether the claim is instead that every contrast is between -limit and limit.
    """
    n, family = min(each.seeds for each in contrasts.values()), len(contrasts)
    p = partial(Contrast.p, level=level)
    if n < FEWEST:
        return f"{UNDECIDED}: {n} seeds, at least {FEWEST} are needed"
    if within:
        every = list(contrasts.values())
        above = [max(p(c, -limit, "greater"), p(c, limit, "less")) for c in every]
        below = [min(p(c, -limit, "less", family), p(c, limit, "greater", family)) for c in every]
    else:
        one, all_of = (family, 1) if chosen else (1, family)
        above = [p(c, limit, "greater", one) for c in contrasts.values()]
        below = [p(c, limit, "less", all_of) for c in contrasts.values()]
    if chosen:
        place = list(contrasts).index(chosen)
        above, below, contrasts = [holm(above)[place]], [below[place]], {chosen: contrasts[chosen]}
    else:
        below = holm(below)
    doubts: Sequence[statistics.Side] = ("two-sided", "two-sided") if within else ("greater", "less")
    sides = [[c.unsure(side, family, level) for c in contrasts.values()] for side in doubts]
    if max(above) < level / 2 and not any(sides[0]):
        exact = all(c.paired and 2.0**-c.seeds < level / 2 for c in contrasts.values())
        return _HOLDS if exact else f"{_HOLDS} (by t test, not confirmed exactly)"
    if any(p < level / 2 and not doubt for p, doubt in zip(below, sides[1], strict=True)):
        return _NOT
    if max(above) < level / 2 or min(below) < level / 2:
        return f"cannot be decided with {n} seeds"
    _, worst = max(zip(above, contrasts.values(), strict=True), key=lambda pair: pair[0])
    distance = abs(worst.estimate.centre - limit)
    level /= family if chosen else 1
    if distance == 0:
        return f"{UNDECIDED} (the mean is the limit)"
    if worst.sd == 0:
        enough = math.floor(-math.log2(level / 2)) + 1
        return f"{UNDECIDED} (equal values: {n} seeds cannot reach p < {level / 2:.4g}, {enough} can)"
    sds = worst.sd, statistics.sd_limit(worst.sd, n)
    needed, most = (statistics.seeds_needed(distance, sd, level) for sd in sds)
    seeds = f"about {needed}" if needed <= _MANY else f"more than {_MANY}"
    seeds += f" (up to {most})" if most <= _MANY else ""
    least = statistics.detectable(worst.sd, n, level)
    return f"{UNDECIDED} ({least:.3f} detectable; {seeds} seeds for {distance:.3f})"


def shown(estimate: Estimate, decimals: int = 3, zero: str = "z") -> str:
    """Return an estimate with its interval as text; "-" without values. `zero`: "z" for no "-0.000"."""
    if estimate.seeds == 0:
        return "-"
    centre, low, high = (f"{value:{zero}.{decimals}f}" for value in estimate[:3])
    return centre if estimate.seeds < 2 else f"{centre} ({low}, {high})"


def _verdict(
    results: Results, formula: Formula, tasks: Sequence[str], key: str
) -> tuple[str, str, Mapping[str, Contrast]]:
    """Return verdict, numbers and differences of a claim about tasks; `key`: that of the study file."""
    chosen, left, terms = "", formula.left, {}  # type: str, Operand | None, dict[str, list[Term]]
    if left is not None:
        if BEST in left.methods:
            left = replace(left, methods=tuple(results.spec.methods))
        terms = _differences(results, formula, left, tasks)
        if any(term.cell not in results.seeds for several in terms.values() for term in several):
            return _ELSEWHERE, "", {}
    if results.missing:
        return "runs are missing", "", {}
    contrasts = {name: results.contrast(each) for name, each in terms.items()}
    if left is None:
        own = results.spec.call(key, formula.text, results.rows)
        try:
            samples = {str(name): np.array([values], float) for name, values in own.items()}
        except (AttributeError, TypeError, ValueError):
            samples = {}
        if not samples or not all(x.ndim == 2 and np.isfinite(x).all() for x in samples.values()):
            rule = f"{results.spec.at(key)} must return differences by name, one number for each seed"
            raise UserError(f'{rule}, got {shortened(repr(own), 60)}; return {{"a - b": [0.1, -0.2, 0.3]}}')
        contrasts = {name: Contrast(x, [1.0], True) for name, x in samples.items()}
    if not contrasts or not all(map(results.complete, terms.values())):
        return f"{UNDECIDED}: a run failed, or does not have the value", "", {}
    contrasts = {name: contrasts[name] for name in distinct({n: c.samples for n, c in contrasts.items()})}
    told = about = contrasts
    remark = ""
    if left is not formula.left and left is not None:
        n = min(each.seeds for each in contrasts.values())
        half = n // 2 if n // 2 >= FEWEST else 0  # seeds that choose the method
        signs, values = {name: task.sign for name, task in results.spec.tasks.items()}, {}
        every = Operand(Quantity.VALUE, tuple(contrasts), left.levels)
        for name, cells in _differences(results, replace(formula, right=None), every, tasks).items():
            scores = [each._replace(weight=each.weight * signs[each.cell.task]) for each in cells]
            values[name] = results.contrast(scores).values[: half or None].mean()
        chosen = max(values, key=values.__getitem__)
        told, remark = {chosen: contrasts[chosen]}, f", chosen afterwards among {len(contrasts)}"
        about = told
        if half:
            contrasts = told = {chosen: replace(told[chosen], samples=told[chosen].samples[:, half:])}
            chosen, remark = "", f", chosen by {half} seeds and judged by {n - half}"
    decimals = 4 if left and left.quantity == Quantity.SLOPE else 3
    numbers = ", ".join(f"{name} {shown(each.estimate, decimals)}" for name, each in told.items()) + remark
    fallen = ", ".join(f"{each.collapsed} in {name}" for name, each in told.items() if each.collapsed)
    numbers += f"; collapsed runs: {fallen}" if fallen else ""
    limit, within = formula.number, formula.sign == "within"
    if formula.sign == "<":
        contrasts, limit = {name: -each for name, each in contrasts.items()}, -limit
    return decided(contrasts, limit, results.level, chosen=chosen, within=within), numbers, about


def _differences(
    results: Results, formula: Formula, left: Operand, tasks: Sequence[str]
) -> dict[str, list[Term]]:
    """Return left minus factor * right of a claim as sums of cells, the mean over the tasks.

    The sums have names, and are those of all methods and of all values of `every`.
    """
    right, axes, found = formula.right, results.spec.axes, {}  # type: Operand | None, Any, dict[str, list[Term]]

    def terms(side: Operand, method: str, weight: float) -> list[Term]:
        levels = {**side.levels, **every}
        axis = side.over or next(iter(levels), "")
        cells = (results.spec.cell(task, method, levels) for task in tasks)
        parts = (term for cell in cells for term in results.terms(side.quantity, cell, axis))
        return [term._replace(weight=weight / len(tasks) * term.weight) for term in parts]

    for method, levels in product(left.methods, product(*(axes[axis].values for axis in left.every))):
        every = dict(zip(left.every, levels, strict=True))
        place = "".join(f" {axis}={value}" for axis, value in every.items())
        if right is None:
            found[method + place] = terms(left, method, 1.0)
            continue
        others = [each for each in right.methods if each != method or right.quantity != left.quantity]
        for other in [method] if right.methods == (SAME,) else others:
            name = method if other == method else f"{method} - {other}"
            found[name + place] = terms(left, method, 1.0) + terms(right, other, -formula.factor)
    return found
