"""Verdicts on the claims of a study. There are none while runs are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from runpy import run_path
from typing import Any, NamedTuple

from rlhf.core.errors import UserError
from rlhf.core.statistics import (
    HOLDS,
    LEVEL,
    NOT,
    UNDECIDED,
    Estimate,
    detectable,
    distinct,
    holm,
    seeds_needed,
)
from rlhf.study.cells import cell_of
from rlhf.study.formula import BEST, SAME, SLOPE, Formula, Side, read_formula
from rlhf.study.results import FEWEST, Contrast, Results, Term
from rlhf.study.rows import Row
from rlhf.study.spec import VALUE

_MANY = 1000  # more seeds are not counted


class Judged(NamedTuple):
    """A claim with its verdict, the numbers that the verdict is made of, and its task; None: all tasks."""

    said: str
    formula: str
    task: str | None
    verdict: str
    numbers: str


def judged(results: Results) -> Iterator[Judged]:
    """Yield the claims of a study with their verdicts, once per task or for all tasks together."""
    for said, text in results.spec.claims.items():
        formula = read_formula(text)
        assert formula is not None
        together = formula.pooled or formula.left is None
        for tasks in [[*results.spec.tasks]] if together else [[task] for task in results.spec.tasks]:
            missing = "runs are missing", ""
            verdict, numbers = missing if results.missing else _verdict(results, formula, tasks)
            yield Judged(said, text, None if together else tasks[0], verdict, numbers)


def decided(
    contrasts: Mapping[str, Contrast], limit: float, level: float, *, chosen: str = "", within: bool = False
) -> str:
    """Return the verdict on the claim that every contrast is above a limit.

    The claim holds if every one-sided p-value is below `level` / 2. All have to be small, so this needs no
    correction (intersection-union test). It does not hold if the smallest Holm p-value of the other side is
    below `level` / 2. A contrast with a collapsed run decides nothing unless the sign-flip test can.

    Args:
        contrasts: the contrasts by name.
        limit: the limit.
        level: probability of a false verdict.
        chosen: the contrast of the best method: the claim is about this one, and corrected for all, because
            the same seeds have chosen the method.
        within: whether the claim is instead that every contrast is between -limit and limit.
    """
    n, family = min(each.seeds for each in contrasts.values()), len(contrasts)
    if n < FEWEST:
        return f"{UNDECIDED}: {n} seeds, at least {FEWEST} are needed"
    if within:
        above = [max(c.p(-limit, "greater"), c.p(limit, "less")) for c in contrasts.values()]
        below = [min(c.p(-limit, "less", family), c.p(limit, "greater", family)) for c in contrasts.values()]
    else:
        above = [c.p(limit, "greater", family if chosen else 1) for c in contrasts.values()]
        below = [c.p(limit, "less", 1 if chosen else family) for c in contrasts.values()]
    if chosen:
        above, below = [holm(above)[list(contrasts).index(chosen)]], [below[list(contrasts).index(chosen)]]
        contrasts = {chosen: contrasts[chosen]}
    else:
        below = holm(below)
    unsure = [c.undecidable(family, level) for c in contrasts.values()]
    if max(above) < level / 2 and not any(unsure):
        exact = all(c.paired and 2.0**-c.seeds < level / 2 for c in contrasts.values())
        return HOLDS if exact else f"{HOLDS} (by t test, not confirmed exactly)"
    if any(p < level / 2 and not doubt for p, doubt in zip(below, unsure, strict=True)):
        return NOT
    if any(unsure) and (max(above) < level / 2 or min(below) < level / 2):
        return f"cannot be decided with {n} seeds"
    _, worst = max(zip(above, contrasts.values(), strict=True), key=lambda pair: pair[0])
    distance = abs(worst.estimate.centre - limit)
    if worst.sd == 0 or distance == 0:
        return UNDECIDED
    level /= family if chosen else 1
    needed = seeds_needed(distance, worst.sd, level)
    seeds = f"about {needed}" if needed <= _MANY else f"more than {_MANY}"
    return f"{UNDECIDED} ({detectable(worst.sd, n, level):.3f} detectable; {seeds} seeds for {distance:.3f})"


def shown(estimate: Estimate, decimals: int = 3, zero: str = "z") -> str:
    """Return an estimate with its interval as text; "-" without values. `zero`: "z" for no "-0.000"."""
    if estimate.seeds == 0:
        return "-"
    centre, low, high = (f"{value:{zero}.{decimals}f}" for value in estimate[:3])
    return centre if estimate.seeds < 2 else f"{centre} ({low}, {high})"


def own_function(address: str) -> Callable[[Sequence[Row]], Any]:
    """Return the function that an address names, <file>.py:<function> or <module>:<function>.

    Raises:
        UserError: there is no such function.
    """
    place, _, name = address.rpartition(":")
    try:
        found = run_path(place) if place.endswith(".py") else vars(import_module(place))
        return found[name]
    except (ImportError, OSError, KeyError) as error:
        form = "<file>.py:<function> or <module>:<function>"
        raise UserError(
            f"a claim or analysis must name a function ({form}), got {address} ({error!r}); fix the name"
        ) from error


def _verdict(results: Results, formula: Formula, tasks: Sequence[str]) -> tuple[str, str]:
    """Return the verdict on a claim about tasks, and its numbers."""
    spec, chosen = results.spec, ""
    if formula.left is None:
        found = own_function(formula.text)(results.rows)
        contrasts = {n: Contrast([dict(enumerate(x))], [1.0], True, 0) for n, x in found.items()}
        terms: dict[str, list[Term]] = {}
    else:
        if BEST in formula.left.methods:
            formula = replace(formula, left=replace(formula.left, methods=tuple(spec.methods)))
            chosen = "best"
        terms = _differences(results, formula, tasks)
        contrasts = {name: results.contrast(each) for name, each in terms.items()}
    if not contrasts or not all(map(results.complete, terms.values())):
        return f"{UNDECIDED}: a run failed, or does not have the value", ""
    contrasts = {name: contrasts[name] for name in distinct({n: c.all_values for n, c in contrasts.items()})}
    if chosen:
        side = Side(VALUE, (), formula.left.levels if formula.left else {})
        values = {m: results.contrast(_terms(results, side, m, {}, tasks, 1.0)) for m in contrasts}
        chosen = max(contrasts, key=lambda name: values[name].estimate.centre)
    decimals = 4 if formula.left and formula.left.quantity == SLOPE else 3
    told = {chosen: contrasts[chosen]} if chosen else contrasts
    numbers = ", ".join(f"{name} {shown(each.estimate, decimals)}" for name, each in told.items())
    numbers += f", chosen afterwards among {len(contrasts)}" if chosen else ""
    fallen = ", ".join(f"{each.collapsed} in {name}" for name, each in told.items() if each.collapsed)
    numbers += f"; collapsed runs: {fallen}" if fallen else ""
    limit, within = formula.number, formula.sign == "within"
    if formula.sign == "<":
        contrasts, limit = {name: -each for name, each in contrasts.items()}, -limit
    return decided(contrasts, limit, LEVEL / spec.looks, chosen=chosen, within=within), numbers


def _differences(results: Results, formula: Formula, tasks: Sequence[str]) -> dict[str, list[Term]]:
    """Return left minus factor * right of a claim, by name, for all methods and for all values of `every`."""
    left, right, found = formula.left, formula.right, {}
    assert left is not None
    axes = results.spec.axes
    for method, levels in product(left.methods, product(*(axes[axis].values for axis in left.every))):
        every = dict(zip(left.every, levels, strict=True))
        place = "".join(f" {axis}={value}" for axis, value in every.items())
        others = [method] if right and right.methods == (SAME,) else right.methods if right else [None]
        for other in others:
            terms = _terms(results, left, method, every, tasks, 1.0)
            if right is not None and other is not None:
                terms += _terms(results, right, other, every, tasks, -formula.factor)
            if other != method or (right and right.methods == (SAME,)):
                name = method if other in (None, method) else f"{method} - {other}"
                found[name + place] = terms
    return found


def _terms(
    results: Results, side: Side, method: str, every: Mapping[str, str], tasks: Sequence[str], weight: float
) -> list[Term]:
    """Return a side of a claim about a method as a sum of cells, the mean over the tasks."""
    levels = {**side.levels, **every}
    axis = side.over or next(iter(levels), None)
    return [
        Term(weight / len(tasks) * term.weight, term.cell, term.quantity)
        for task in tasks
        for term in results.terms(side.quantity, cell_of(results.spec, task, method, levels), axis)
    ]
