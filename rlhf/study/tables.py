"""Tables of a study, the differences that it supports, and what its seeds can show; as text in all forms."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from rlhf.core import statistics
from rlhf.core.statistics import LEVEL, Estimate
from rlhf.study.cells import Cell, cell_of
from rlhf.study.claims import HOLDS, NOT, UNDECIDED, Judged, shown
from rlhf.study.formula import read_formula
from rlhf.study.results import FEWEST, START, Contrast, Results, Term
from rlhf.study.rows import unpacked
from rlhf.study.spec import AT_KL, AT_TIME, COLLAPSED, LOSS, VALUE, Axis, Spec, Table
from rlhf.study.tuning import read_choices

SUPPORTED, SUGGESTED = "supported", "suggested"
EDGE = " (chosen on an edge)"
_AGAINST = "methods against their bases"
_MARGIN = 0.02  # difference for which seeds are counted, if the study has no margin
_ENOUGH = 20  # values from which on an interquartile mean is shown
_WIDTH = 80  # columns of the terminal
_UNKNOWN = re.compile("[^\0-\xff]|[\xd0\xde\xf0\xfe]")  # characters that pdflatex lacks without a package
_INTERVAL = re.compile(r" \((-?[\d.]+), (-?[\d.]+)\)")


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
    """Yield tables (None: those of the study), task by task, without columns whose cells have no runs."""
    spec = results.spec
    for name, task in spec.tasks.items():
        for table in spec.tables if declared is None else declared:
            quantity, axis, title = table
            titles = {VALUE: f"final {task.name}", COLLAPSED: "collapsed runs"}
            if task.at_kl is not None:
                titles[AT_KL] = f"gold score at KL {task.at_kl:g}"
            if task.at_time is not None:
                titles[AT_TIME] = f"{task.name} at {task.at_time:g} virtual s"
            if quantity in (AT_KL, AT_TIME) and quantity not in titles:
                continue
            values = [*spec.axes[axis].values] if axis else [""]
            if quantity == LOSS:
                values.remove(base := spec.axes[axis].bases[name])
                title = title or f"loss of {task.name} against {axis}{' = ' if len(axis) == 1 else ' '}{base}"
            found = {
                f"{axis} {value}" if axis else "value": [
                    _entry(results, table, cell_of(spec, name, method, {axis: value}))
                    for method in spec.methods
                ]
                for value in values
            }
            columns = [column for column, entries in found.items() if any(each.runs for each in entries)]
            if columns:
                entries = zip(*(found[column] for column in columns), strict=True)
                rows = dict(zip(spec.methods, entries, strict=True))
                yield Shown(name, table, title or titles.get(quantity, quantity), columns, rows)


def _entry(results: Results, table: Table, cell: Cell) -> Entry:
    """Return a cell of a table; the text is empty if the cell belongs to no grid."""
    found = results.contrast(results.terms(table.quantity, cell, table.axis))
    percentile = results.spec.interval == "percentile"
    runs = len(results.cells.get(cell, {})) + results.lacking[cell]
    fallen = results.collapsed(cell)
    estimate, having = found.estimate, found.seeds
    if table.quantity == COLLAPSED:
        text = f"{fallen}/{runs}"
        if fallen and not percentile:
            text += " ({:.2f}, {:.2f})".format(*statistics.wilson(fallen, runs))
    elif table.quantity in (VALUE, LOSS, AT_KL, AT_TIME):
        if percentile and having > 1:
            estimate = statistics.bootstrap_interval(found.values)
        text = shown(estimate, 2 if table.quantity == AT_KL else 3, "" if percentile else "z")
        text += f" [{having}/{runs}]" if having < runs else ""
        text += " \\*" if fallen and not percentile else ""
    else:
        text = f"{estimate.centre:.2f}" if having else "-"
        text += f" [{having}/{runs}]" if having < runs else ""
    return Entry(text if runs else "", estimate, having, runs, fallen)


def over_tasks(results: Results) -> Iterator[list[list[str]]]:
    """Yield a table for each axis of a table of values: interquartile means over the seeds of all tasks.

    Values are normalised: in each task, 0 is the mean before training, and 1 the best mean of the table. A
    table is shown from `_ENOUGH` values in each cell on; intervals are those of the stratified bootstrap.
    """
    spec = results.spec
    for axis in dict.fromkeys(table.axis for table in spec.tables if table.quantity == VALUE):
        columns = [*spec.axes[axis].values] if axis else [""]
        places, strata = list(product(spec.methods, columns)), []
        for task in spec.tasks:
            cells = [cell_of(spec, task, method, {axis: value}) for method, value in places]
            start = [x for cell in cells for x in results.measured(cell, START).values()]
            found = [np.array([*results.measured(cell, VALUE).values()]) for cell in cells]
            if not start or not all(map(len, found)):
                break
            gains = [spec.tasks[task].sign * (values - np.mean(start)) for values in found]
            best = max(gain.mean() for gain in gains)
            strata += [[gain / best for gain in gains]] if best > 0 else []
        if (
            1 < len(strata) == len(spec.tasks)
            and min(sum(map(len, x)) for x in zip(*strata, strict=True)) >= _ENOUGH
        ):
            shares = zip(*strata, strict=True)
            texts = [shown(statistics.bootstrap_interval(*each, resamples=2000), 2) for each in shares]
            rows = [texts[start : start + len(columns)] for start in range(0, len(texts), len(columns))]
            heads = ["share of the best gain", *(f"{axis} {value}".strip() or "all" for value in columns)]
            yield [heads, *([f"`{method}`", *row] for method, row in zip(spec.methods, rows, strict=True))]


# -- differences that are supported ------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The test of one difference of a family."""

    names: Sequence[str]  # the name of the difference, and those of equal ones
    contrast: Contrast
    p: float  # of the t test, or of the sign-flip test if that is larger and could reach the level
    holm: float  # the same, corrected for all differences of the family
    verdict: str  # `SUPPORTED`, `SUGGESTED`, `UNDECIDED`, or that these seeds cannot decide
    small: str  # the same about the statement that the difference is below the margin

    @property
    def name(self) -> str:
        """The names as Markdown."""
        return " = ".join(f"`{name}`" for name in self.names)


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
    for task, axis in product(spec.tasks, axes):
        known = spec.axes[axis] if axis else Axis({}, {}, None)
        others = [value for value in known.values if value != known.bases[task]]
        at = {axis: others[-1]} if others else {}
        cells = {method: cell_of(spec, task, method, at) for method in spec.methods}
        losses = {m: results.terms(LOSS, cell, axis) for m, cell in cells.items()} if at else {}
        gains = {
            f"{m} - {method.base}": [Term(1.0, cells[m], VALUE), Term(-1.0, cells[method.base], VALUE)]
            for m, method in spec.methods.items()
            if method.base is not None
        }
        for what, family in ((f"{LOSS} of {spec.tasks[task].name}", losses), (_AGAINST, gains)):
            made = {n: results.contrast(terms) for n, terms in family.items() if results.complete(terms)}
            made = {
                n: c for n, c in made.items() if c.seeds >= FEWEST and (what != _AGAINST or any(c.values))
            }
            if made:
                margin = None if what == _AGAINST else spec.margin
                found = tested(made, results.level, margin)
                yield Family(task, f"{axis} {at[axis]}" if at else "all", what, found)


def tested(
    contrasts: Mapping[str, Contrast], level: float = LEVEL, margin: float | None = None
) -> list[Finding]:
    """Return the tests of a family of differences, the largest difference first; equal ones count once."""
    names = statistics.distinct({name: each.samples for name, each in contrasts.items()})
    cases, n = [contrasts[name] for name in names], len(names)
    p = [each.p(family=n, level=level) for each in cases]
    below = [each.p(margin or 0.0, "less", n, level) for each in cases]
    tests = zip(names.values(), cases, p, statistics.holm(p), below, statistics.holm(below), strict=True)
    found = []
    for same, each, raw, corrected, low, lower in tests:
        verdict = SUPPORTED if corrected < level else SUGGESTED if raw < level else UNDECIDED
        if each.unsure("greater" if each.estimate.centre > 0 else "less", n, level):
            verdict = f"cannot be decided with {each.seeds} seeds"
        small = SUPPORTED if lower < level / 2 else SUGGESTED if low < level / 2 else UNDECIDED
        small = UNDECIDED if each.unsure("less", n, level) else small
        found.append(Finding(same, each, raw, corrected, verdict, small))
    return sorted(found, key=lambda finding: -finding.contrast.estimate.centre)


def weaker_finding(spec: Spec, claim: Judged, found: Sequence[Family]) -> str | None:
    """Return the verdict of a finding that does not support what a decided claim says; None: there is none.

    A claim says that a difference is not 0, or that a loss is below the margin, and findings are about both.
    """
    formula, holds = read_formula(claim.formula), claim.verdict.startswith(HOLDS)
    if formula is None or formula.sign not in ("<", ">") or not (holds or claim.verdict == NOT):
        return None
    sign = 1 if (formula.sign == ">") == holds else -1
    limit = 0.0 if formula.right else formula.number
    if sign * limit < 0 and (sign > 0 or limit != spec.margin):
        return None
    differs = sign * limit >= 0
    tests = [each for family in found for each in family.findings if differs or family.what != _AGAINST]
    known = []
    for c in claim.contrasts.values():
        same = [each.verdict if differs else each.small for each in tests if _same(c, each.contrast)]
        known.append(same[0] if same else SUPPORTED)
    weak = [verdict for verdict in known if verdict != SUPPORTED]
    return weak[0] if weak and (holds or len(weak) == len(known)) else None


def _same(one: Contrast, other: Contrast) -> bool:
    """Return whether two contrasts are the same difference, apart from its sign."""
    a, b = np.abs(one.values), np.abs(other.values)
    return a.shape == b.shape and bool(a.any()) and np.allclose(a, b, rtol=0, atol=1e-12)


def findings(results: Results, found: Sequence[Family]) -> Iterator[str]:
    """Yield what is supported, only suggested, and undecided, as sentences; none while runs are missing."""
    if results.missing:
        return
    margin, level = results.spec.margin, results.level
    for task, column, what, family in found:
        parts, seeds = [], min(each.contrast.seeds for each in family)
        for verdict in dict.fromkeys((SUPPORTED, SUGGESTED, *(each.verdict for each in family))):
            same = (each for each in family if each.verdict == verdict)
            said = ", ".join(f"{each.name} {shown(each.contrast.estimate)}" for each in same)
            if verdict == SUPPORTED:
                parts.append(f"**{SUPPORTED}**: {said or 'none'}")
            elif said and verdict != UNDECIDED:
                parts.append(f"{verdict}: {said}")
        parts.append(f"{UNDECIDED}: {sum(each.verdict == UNDECIDED for each in family)} of {len(family)}")
        unable = statistics.smallest_p(seeds) * len(family) > level
        if unable and any(each.verdict == SUPPORTED for each in family):
            parts.append(f"by t test alone: {seeds} seeds cannot confirm one of {len(family)} exactly")
        yield f"`{task}`, {column}, {what}: {'; '.join(parts)}."
        if margin is not None and what != _AGAINST:
            sure, more = (
                ", ".join(each.name for each in family if each.small == verdict)
                for verdict in (SUPPORTED, SUGGESTED)
            )
            said = f"{sure or 'no method'}{more and f' ({SUGGESTED}: {more})'}"
            yield f"`{task}`, {column}: a loss of at most {margin:g} is {SUPPORTED} for {said}."
    if tests := [each for family in found for each in family.findings]:
        low = sum(each.p < level for each in tests)
        said = f"Of {len(tests)} two-sided tests, {low} have p < {level:g} before the correction"
        yield f"{said}; about {level * len(tests):.0f} would have it if no method differed."


def tuned(spec: Spec) -> list[list[str]]:
    """Return the tuned values by task, method and point, with headings; no lines without choices."""
    sources = [each for each in (spec, spec.tune and spec.tune.source) if each]
    choices = next(filter(None, (read_choices(each.folder / "rates.json") for each in sources)), {})
    known = {key: each for key, each in choices.items() if key[0] in spec.tasks and key[1] in spec.methods}
    heads = ["task", "method", *dict.fromkeys(point or "value" for *_, point in known)]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for (task, method, point), each in known.items():
        text = ", ".join(f"{key}={value}" for key, value in each.chosen.items()) + EDGE * each.edge
        lines.setdefault((task, method), {})[point or "value"] = text
    rows = [[f"`{x}`" for x in name] + [each.get(x, "") for x in heads[2:]] for name, each in lines.items()]
    return [heads, *rows] if lines else []


# -- what the seeds can show -------------------------------------------------------------------------------


def resolution(results: Results) -> list[list[str]]:
    """Return the noise ceilings of rankings and the numbers of seeds of each column, with headings."""
    spec, margin = results.spec, results.spec.margin or _MARGIN
    order = f" ({' / '.join(spec.tasks)})" if len(spec.tasks) > 1 else ""
    heads = ("tau of halves", "ceiling", "seeds for 0.8", "detectable", f"seeds for {margin:g} (up to)")
    more = ("equal values", "tau between the tasks", "evaluation noise")
    found = [[f"column{order}", *heads, *more]]
    axes = dict.fromkeys(table.axis for table in spec.tables if table.quantity == VALUE)
    for axis, value in [(name, v) for name in axes for v in (spec.axes[name].values if name else [""])]:
        cells = [[cell_of(spec, task, m, {axis: value}) for m in spec.methods] for task in spec.tasks]
        values = [table for column in cells if (table := results.table(column[0])) is not None]
        if len(values) == len(cells) and len(spec.methods) > 1:
            noise = " / ".join(_noise(results, column) for column in cells)
            found.append([f"{axis} {value}".strip() or "all", *_seen(values, margin), noise])
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
    columns, between, seeds = [], "-", values[0].shape[1]
    signals = [statistics.signal(table) for table in values]
    for table, signal in zip(values, signals, strict=True):
        enough = statistics.seeds_for_ceiling(signal)
        spreads = [(one - other).std(ddof=1) for one, other in combinations(table, 2) if (one - other).any()]
        sd = float(np.median(spreads or [0.0]))
        sds = sd, statistics.sd_limit(sd, seeds)
        columns.append(
            [  # in the order of the headings
                f"{statistics.split_half(table).mean():.2f}",
                f"{statistics.ceiling([signal], seeds):.2f}",
                "-" if enough is None else str(enough),
                f"{statistics.detectable(sd, seeds):.3f}",
                "{} ({})".format(*(statistics.seeds_needed(margin, each) for each in sds)),
                f"{statistics.saturation(table):.2f}",
            ]
        )
    if len(values) == 2:
        tau = statistics.tau(*(table.mean(1) for table in values))
        between = f"{tau:.2f} of {statistics.ceiling(signals, seeds):.2f}"
    return [*(" / ".join(each) for each in zip(*columns, strict=True)), between]


# -- forms -------------------------------------------------------------------------------------------------


def as_table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are aligned left, the others right."""
    rule = ["---" if place < left else "--:" for place in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def as_latex(table: Shown) -> str:
    """Return a table for LaTeX with the package booktabs."""
    head, *body = (" & ".join(map(_in_latex, line)) + r" \\" for line in table.lines)
    begin = [f"% {table.task}", r"\begin{tabular}{l" + "r" * len(table.columns) + "}", r"\toprule"]
    return "\n".join([*begin, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def _in_latex(text: str) -> str:
    text = re.sub(r"[&%$#_{}]", r"\\\g<0>", text.replace("\\*", "*").replace("\\", "\0"))
    text = re.sub(r"[~^]", r"\\\g<0>{}", text).replace("*", "$^*$")
    text = re.sub(r"[<>|]", r"$\g<0>$", re.sub(r"^\[", "{[}", text))  # a bracket would be an argument of \\
    text = re.sub(r"`([^`]*)`", r"\\texttt{\1}", text)
    text = _INTERVAL.sub(r" {\\scriptsize [$\1$, $\2$]}", text)
    text = re.sub(r"(?<![\w$.-])(-[\d.]+)", r"$\1$", text).replace("\0", r"\textbackslash{}")
    return _UNKNOWN.sub(lambda each: f"U+{ord(each[0]):04X}", text)


def for_terminal(table: Shown) -> Iterator[str]:
    """Yield the lines of a table, at most `_WIDTH` columns wide; intervals as half of their width."""
    texts = [["", *table.columns]]
    for method, row in table.rows.items():
        halves = [f"\N{PLUS-MINUS SIGN}{(each.estimate.high - each.estimate.low) / 2:.3f}" for each in row]
        cells = (_INTERVAL.sub(half, each.text) for half, each in zip(halves, row, strict=True))
        texts.append([method, *(text.replace(" \\*", "*") for text in cells)])
    first = max(len(line[0]) for line in texts)
    wide = max(len(text) for line in texts for text in line[1:])
    count = max(1, (_WIDTH - first) // (wide + 2))
    yield f"{table.task}: {table.title}"
    for start in range(1, len(texts[0]), count):
        for line in texts:
            yield f"{line[0]:{first}}" + "".join(f"  {text:>{wide}}" for text in line[start : start + count])


def tables_csv(tables: Sequence[Shown]) -> str:
    """Return tables as CSV, one line per task, method and column."""
    lines = [
        [each.table.quantity, each.task, method, column, *entry.estimate[:3], *entry[2:]]
        for each in tables
        for method, row in each.rows.items()
        for column, entry in zip(each.columns, row, strict=True)
        if entry.runs
    ]
    return _csv("quantity,task,method,column,centre,low,high,seeds,runs,collapsed", lines)


def tests_csv(found: Sequence[Family]) -> str:
    """Return the tests as CSV: estimates, p-values, verdicts, and what the seeds could detect."""
    lines = []
    for task, column, what, family in found:
        for each in family:
            c = each.contrast
            exact = statistics.p_sign_flip(c.values) if c.paired else ""
            sds = c.sd, statistics.sd_limit(c.sd, c.seeds)
            needed = [statistics.seeds_needed(_MARGIN, sd) for sd in sds]
            numbers = [*c.estimate[:3], each.p, each.holm, exact, each.verdict]
            numbers += [statistics.detectable(c.sd, c.seeds), *needed]
            lines.append([task, column, what, " = ".join(each.names), *numbers])
    names = f"mean,low,high,p,p_holm,p_exact,verdict,detectable,seeds_for_{_MARGIN:g},up_to"
    return _csv(f"task,column,test,name,{names}", lines)


def _csv(heads: str, lines: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([heads.split(","), *lines])
    return out.getvalue()
