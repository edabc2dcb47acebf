"""Which differences of a column are supported after Holm, only suggested, or undecided."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.atlas import analysis
from benchmarks.atlas.claims import WITHIN, text
from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study
from rlhf.core import statistics
from rlhf.core.statistics import LEVEL

BASES = {  # corrected method -> the same objective without correction
    "dpo+is": "dpo",
    "dpo+wpo": "dpo",
    "m2po": "grpo",
    "geometric": "grpo",
    "truncate": "grpo",
}
SUPPORTED, SUGGESTED, UNDECIDED = "supported", "suggested", "undecided"


class Finding(NamedTuple):
    """The test of one difference of a family.

    Attributes:
        names: the name of the difference, and those of differences with equal values.
        values: one difference per seed.
        p: p-value of the paired t test.
        p_holm: the same, corrected for all differences of the family.
        p_exact: p-value of the sign-flip test.
        verdict: `SUPPORTED`, `SUGGESTED`, `UNDECIDED`, or that these seeds cannot decide.
    """

    names: Sequence[str]
    values: Sequence[float]
    p: float
    p_holm: float
    p_exact: float
    verdict: str

    @property
    def name(self) -> str:
        """The names as Markdown."""
        return " = ".join(f"`{name}`" for name in self.names)


def tested(samples: Mapping[str, Sequence[float]], collapsed: Collection[str] = ()) -> list[Finding]:
    """Return the tests of a family of differences, the largest difference first.

    Args:
        samples: differences of the seeds, by name. Names with equal values count once.
        collapsed: names that include a collapsed run. A t test does not cover such outliers, so these are
            decided only if the sign-flip test can reach the level.
    """
    names = statistics.distinct(samples)
    p = [statistics.p_value(samples[name], family=len(names)) for name in names]
    found = []
    for (name, same), raw, corrected in zip(names.items(), p, statistics.holm(p), strict=True):
        seeds = len(samples[name])
        verdict = SUPPORTED if corrected < LEVEL else SUGGESTED if raw < LEVEL else UNDECIDED
        if name in collapsed and statistics.smallest_p(seeds) * len(names) > LEVEL:
            verdict = f"cannot be decided with {seeds} seeds"
        exact = statistics.p_sign_flip(samples[name])
        found.append(Finding(same, samples[name], raw, corrected, exact, verdict))
    return sorted(found, key=lambda each: -float(np.mean(each.values)))


class Column(NamedTuple):
    """The cells of a task at one lag or N."""

    task: str
    label: str
    cells: Mapping[str, Cell]


def columns(study: Study, largest: bool = False) -> Iterator[Column]:
    """Yield the columns of every task: the lags, then N; with `largest` only the largest lag and N."""
    design = study.design
    for task in design.tasks:
        levels = [("lag", "lag", lag) for lag in design.lags]
        levels += [("minibatches", "N =", n) for n in design.minibatches if n > 1]
        for key, word, level in levels:
            if not largest or level == max(getattr(design, "lags" if key == "lag" else key)):
                cells = {method: design.cell(task, method, **{key: level}) for method in design.methods}
                yield Column(task, f"{word} {level}", cells)


def losses(study: Study, column: Column) -> list[Finding]:
    """Return the tests of the losses of all methods in a column; none if a run is missing."""
    if study.table(list(column.cells.values())) is None:
        return []
    found = {method: list(study.losses(cell).values()) for method, cell in column.cells.items()}
    return tested(found, [method for method, cell in column.cells.items() if study.collapsed(cell)])


def gains(study: Study, column: Column) -> list[Finding]:
    """Return the tests of corrected methods minus their bases; without those that are equal in all seeds."""
    cells = {
        method: cell
        for method, cell in column.cells.items()
        if method in BASES and BASES[method] in column.cells
    }
    if study.table(list(column.cells.values())) is None:
        return []
    found = {}
    for method, cell in cells.items():
        base = column.cells[BASES[method]]
        values = analysis.differences(study.values(cell), study.values(base))
        if any(values):
            found[f"{method} - {BASES[method]}"] = values
    doubtful = [
        m for m, cell in cells.items() if study.collapsed(cell) + study.collapsed(column.cells[BASES[m]])
    ]
    return tested(found, [f"{method} - {BASES[method]}" for method in doubtful])


def findings(study: Study) -> list[str]:
    """Return what is supported, suggested and undecided at the largest lag and the largest N of each task."""
    found, tests = [], []
    for column in columns(study, largest=True):
        label = study.design.tasks[column.task].label
        for what, family in (
            (f"loss of {label}", losses(study, column)),
            ("correction against none", gains(study, column)),
        ):
            if family:
                found.append(f"`{column.task}`, {column.label}, {what}: {stated(family)}.")
                tests += family
        if little := loses_little(losses(study, column)):
            found.append(f"`{column.task}`, {column.label}: {little}.")
    if not tests:
        return ["Runs are missing: nothing is stated."]
    low = sum(each.p < LEVEL for each in tests)
    found.append(
        f"Of the {len(tests)} two-sided tests above, {low} have p < {LEVEL:g} before the correction; about "
        f"{LEVEL * len(tests):.0f} would have, if no method differed."
    )
    return found


def stated(family: Sequence[Finding]) -> str:
    """Return the supported and the suggested differences of a family with values, and count the others."""
    named = {
        verdict: ", ".join(f"{each.name} {text(each.values)}" for each in family if each.verdict == verdict)
        for verdict in dict.fromkeys([SUPPORTED, SUGGESTED, *(each.verdict for each in family)])
    }
    left = sum(each.verdict == UNDECIDED for each in family)
    parts = [f"**{SUPPORTED}**: {named.pop(SUPPORTED) or 'none'}"]
    if suggested := named.pop(SUGGESTED):
        parts.append(f"{SUGGESTED}: {suggested}")
    named.pop(UNDECIDED, None)
    parts += [f"{verdict}: {names}" for verdict, names in named.items()]
    return "; ".join([*parts, f"{UNDECIDED}: {left} of {len(family)}"])


def loses_little(family: Sequence[Finding]) -> str:
    """Return which methods lose at most `WITHIN` by a one-sided test, with and without the correction."""
    if not family:
        return ""
    p = [statistics.p_value(each.values, WITHIN, "less", len(family)) for each in family]
    corrected = statistics.holm(p)
    sure = [each.name for each, value in zip(family, corrected, strict=True) if value < LEVEL / 2]
    maybe = [
        each.name for each, value, raw in zip(family, corrected, p, strict=True) if raw < LEVEL / 2 <= value
    ]
    said = f"a loss of at most {WITHIN} is {SUPPORTED} for {', '.join(sure) or 'no method'}"
    return said + (f" ({SUGGESTED}: {', '.join(maybe)})" if maybe else "")
