"""Tables of a study, the differences that it supports, and what its seeds can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.stats import kendalltau

from rlhf.core import statistics
from rlhf.core.statistics import LEVEL, Estimate
from rlhf.study.cells import Cell, cell_of
from rlhf.study.claims import shown
from rlhf.study.results import FEWEST, Contrast, Results, Term
from rlhf.study.rows import unpacked
from rlhf.study.spec import AT_KL, COLLAPSED, LOSS, VALUE, Table

SUPPORTED, SUGGESTED, UNDECIDED = "supported", "suggested", "undecided"
AGAINST = "methods against their bases"
MARGIN = 0.02  # difference for which seeds are counted, if the study has no margin


class Entry(NamedTuple):
    """A cell of a table: its text in Markdown, the estimate, runs with a value, runs, collapsed runs."""

    text: str
    estimate: Estimate
    having: int
    runs: int
    collapsed: int


@dataclass(frozen=True)
class Shown:
    """A table of a task: title, headings of the columns, and a row of entries for each method."""

    task: str
    table: Table
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Entry]]

    @property
    def lines(self) -> list[list[str]]:
        """The table as texts, with the headings."""
        body = [[f"`{method}`", *(entry.text for entry in row)] for method, row in self.rows.items()]
        return [[self.title, *self.columns], *body]


def tables(results: Results, declared: Sequence[Table] | None = None) -> Iterator[Shown]:
    """Yield tables (None: those of the study), task by task, without those whose cells have no runs."""
    spec = results.spec
    for task in spec.tasks:
        for table in spec.tables if declared is None else declared:
            if table.quantity == AT_KL and spec.tasks[task].at_kl is None:
                continue
            base = spec.axes[table.axis].bases[task] if table.quantity == LOSS else None
            values = [value for value in spec.axes[table.axis].values if value != base] if table.axis else []
            at = [{table.axis: value} for value in values] or [{}]
            rows = {m: [_entry(results, table, cell_of(spec, task, m, x)) for x in at] for m in spec.methods}
            if any(entry.runs for row in rows.values() for entry in row):
                columns = [f"{table.axis} {value}" for value in values] or ["value"]
                yield Shown(task, table, _title(results, table, task), columns, rows)


def _title(results: Results, table: Table, task: str) -> str:
    declared = results.spec.tasks[task]
    if table.title:
        return table.title
    if table.quantity == LOSS:
        joint = " = " if len(table.axis) == 1 else " "
        base = results.spec.axes[table.axis].bases[task]
        return f"loss of {declared.name} against {table.axis}{joint}{base}"
    if table.quantity == AT_KL:
        return f"gold score at KL {declared.at_kl:g}"
    return {VALUE: f"final {declared.name}", COLLAPSED: "collapsed runs"}.get(table.quantity, table.quantity)


def _entry(results: Results, table: Table, cell: Cell) -> Entry:
    """Return a cell of a table; the text is empty if the cell belongs to no grid."""
    found = results.contrast(results.terms(table.quantity, cell, table.axis))
    percentile = results.spec.interval == "percentile"
    runs, fallen = len(results.cells.get(cell, {})), results.collapsed(cell)
    estimate, having = found.estimate, found.seeds
    if table.quantity == COLLAPSED:
        text = f"{fallen}/{runs}"
        if fallen and not percentile:
            text += " ({:.2f}, {:.2f})".format(*statistics.wilson(fallen, runs))
    elif table.quantity in (VALUE, LOSS, AT_KL):
        if percentile and having > 1:
            estimate = statistics.bootstrap_interval(found.values)
        text = shown(estimate, 2 if table.quantity == AT_KL else 3, "" if percentile else "z")
        text += f" [{having}/{runs}]" if having < runs else ""
        text += " \\*" if fallen and not percentile else ""
    else:
        text = f"{estimate.centre:.2f}" if having else ""
    return Entry(text if runs else "", estimate, having, runs, fallen)


# -- differences that are supported ------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The test of one difference of a family."""

    names: Sequence[str]  # the name of the difference, and those of equal ones
    contrast: Contrast
    p: float  # of the t test, or of the sign-flip test if that is larger and could reach the level
    holm: float  # the same, corrected for all differences of the family
    verdict: str  # `SUPPORTED`, `SUGGESTED`, `UNDECIDED`, or that these seeds cannot decide

    @property
    def name(self) -> str:
        """The names as Markdown."""
        return " = ".join(f"`{name}`" for name in self.names)

    def __str__(self) -> str:
        return f"{self.name} {shown(self.contrast.estimate)}"


class Family(NamedTuple):
    """Differences of a column that are corrected together: task, column, what they are, and their tests."""

    task: str
    column: str
    what: str
    findings: Sequence[Finding]


def families(results: Results) -> Iterator[Family]:
    """Yield the tests at the last value of each axis with a table of losses: of losses, and against bases.

    Without a table of losses, methods are compared with their bases at the bases of all axes.
    """
    spec = results.spec
    axes = [table.axis for table in spec.tables if table.quantity == LOSS] or [""]
    for task, axis in ((task, axis) for task in spec.tasks for axis in axes):
        at = {axis: [*spec.axes[axis].values][-1]} if axis else {}
        column = f"{axis} {at[axis]}" if axis else "all"
        cells = {method: cell_of(spec, task, method, at) for method in spec.methods}
        losses = {m: results.terms(LOSS, cell, axis) for m, cell in cells.items()} if axis else {}
        gains = {
            f"{m} - {method.base}": [Term(1.0, cells[m], VALUE), Term(-1.0, cells[method.base], VALUE)]
            for m, method in spec.methods.items()
            if method.base is not None
        }
        for what, family in ((f"{LOSS} of {spec.tasks[task].name}", losses), (AGAINST, gains)):
            made = {n: results.contrast(terms) for n, terms in family.items() if results.complete(terms)}
            made = {
                n: c for n, c in made.items() if c.seeds >= FEWEST and (family is losses or c.values.any())
            }
            if made:
                yield Family(task, column, what, tested(made))


def tested(contrasts: Mapping[str, Contrast]) -> list[Finding]:
    """Return the tests of a family of differences, the largest difference first; equal ones count once."""
    names = statistics.distinct({name: each.all_values for name, each in contrasts.items()})
    p = [contrasts[name].p(family=len(names)) for name in names]
    found = []
    for (name, same), raw, corrected in zip(names.items(), p, statistics.holm(p), strict=True):
        each = contrasts[name]
        verdict = SUPPORTED if corrected < LEVEL else SUGGESTED if raw < LEVEL else UNDECIDED
        if each.undecidable(len(names), LEVEL):
            verdict = f"cannot be decided with {each.seeds} seeds"
        found.append(Finding(same, each, raw, corrected, verdict))
    return sorted(found, key=lambda finding: -finding.contrast.estimate.centre)


def findings(results: Results, found: Sequence[Family]) -> Iterator[str]:
    """Yield what is supported, only suggested, and undecided, as sentences; none while runs are missing."""
    if results.missing:
        return
    margin = results.spec.margin
    for task, column, what, family in found:
        left, parts = sum(each.verdict == UNDECIDED for each in family), []
        for verdict in dict.fromkeys((SUPPORTED, SUGGESTED, *(each.verdict for each in family))):
            said = ", ".join(str(each) for each in family if each.verdict == verdict)
            if verdict == SUPPORTED:
                parts.append(f"**{SUPPORTED}**: {said or 'none'}")
            elif said and verdict != UNDECIDED:
                parts.append(f"{verdict}: {said}")
        yield f"`{task}`, {column}, {what}: {'; '.join(parts)}; {UNDECIDED}: {left} of {len(family)}."
        if margin is not None and what != AGAINST:
            p = [each.contrast.p(margin, "less", len(family)) for each in family]
            small = [
                (each.name, corrected < LEVEL / 2)
                for each, raw, corrected in zip(family, p, statistics.holm(p), strict=True)
                if raw < LEVEL / 2 and not each.contrast.undecidable(len(family), LEVEL)
            ]
            sure, maybe = (
                ", ".join(name for name, is_sure in small if is_sure == which) for which in (True, False)
            )
            more = f" ({SUGGESTED}: {maybe})" if maybe else ""
            at_most = f"a loss of at most {margin:g} is {SUPPORTED} for {sure or 'no method'}"
            yield f"`{task}`, {column}: {at_most}{more}."
    tests = [each for family in found for each in family.findings]
    if tests:
        low = sum(each.p < LEVEL for each in tests)
        said = f"Of {len(tests)} two-sided tests, {low} have p < {LEVEL:g} before the correction"
        yield f"{said}; about {LEVEL * len(tests):.0f} would have it if no method differed."


# -- what the seeds can show -------------------------------------------------------------------------------


def resolution(results: Results) -> list[list[str]]:
    """Return the noise ceilings of rankings and the numbers of seeds of each column, with headings."""
    spec, margin = results.spec, results.spec.margin or MARGIN
    order = f" ({' / '.join(spec.tasks)})" if len(spec.tasks) > 1 else ""
    needed = f"seeds for {margin:g}"
    names = ("tau of halves", "ceiling", "seeds for 0.8", "detectable", needed, "equal values")
    found = [[f"column{order}", *names, "tau between the tasks", "evaluation noise"]]
    axes = dict.fromkeys(table.axis for table in spec.tables if table.quantity == VALUE)
    for axis, value in [(name, v) for name in axes for v in (spec.axes[name].values if name else [""])]:
        at = {axis: value} if axis else {}
        cells = [[cell_of(spec, task, method, at) for method in spec.methods] for task in spec.tasks]
        values = [results.table(spec.methods, of_task[0]) for of_task in cells]
        known = [table for table in values if table is not None and len(table) > 1]
        if len(known) == len(values):
            noise = " / ".join(_noise(results, of_task) for of_task in cells)
            found.append([f"{axis} {value}".strip() or "all", *_seen(known, margin), noise])
    if all(set(line[-1]) <= set("- /") for line in found[1:]):  # no row has bits
        found = [line[:-1] for line in found]
    return found if len(found) > 1 else []


def _noise(results: Results, cells: Sequence[Cell]) -> str:
    """Return the share of evaluation noise in the spread between seeds, the median of cells with bits."""
    shares = []
    for rows in (list(results.cells.get(cell, {}).values()) for cell in cells):
        outcomes = [bits for row in rows if (bits := unpacked(row)) is not None]
        if 1 < len(outcomes) == len(rows) and len({row.prompts for row in rows}) == 1:
            shares.append(statistics.evaluation_share(np.array(outcomes, float), rows[0].prompts))
    return f"{np.median(shares):.2f}" if shares else "-"


def _seen(values: Sequence[np.ndarray], margin: float) -> list[str]:
    """Return the cells of a row of `resolution`, from the values [methods, seeds] of each task."""
    columns, seeds = [], values[0].shape[1]
    for table in values:
        signal = statistics.signal(table)
        enough = statistics.seeds_for_ceiling(signal)
        spreads = [(one - other).std(ddof=1) for one, other in combinations(table, 2) if (one - other).any()]
        sd = float(np.median(spreads or [0.0]))
        columns.append(
            [
                f"{statistics.split_half(table).mean:.2f}",
                f"{statistics.ceiling([signal], seeds):.2f}",
                "-" if enough is None else str(enough),
                f"{statistics.detectable(sd, seeds):.3f}",
                str(statistics.seeds_needed(margin, sd)),
                f"{statistics.saturation(table):.2f}",
            ]
        )
    between = "-"
    if len(values) == 2:
        tau = kendalltau(*(table.mean(1) for table in values)).statistic
        most = statistics.ceiling([statistics.signal(table) for table in values], seeds)
        between = f"{tau:.2f} of {most:.2f}"
    return [*(" / ".join(each) for each in zip(*columns, strict=True)), between]
