"""Verdicts on the claims of a study. There are none while runs are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from runpy import run_path
from typing import Any, NamedTuple

import numpy as np

from rlhf.config.address import load_function
from rlhf.core import statistics
from rlhf.core.errors import UserError, one_line, place_in_code
from rlhf.core.formatting import shortened
from rlhf.core.statistics import Estimate, distinct, holm
from rlhf.study.cells import cell_of
from rlhf.study.formula import BEST, SAME, SLOPE, Formula, Side, read_formula
from rlhf.study.results import FEWEST, Contrast, Results, Term
from rlhf.study.rows import Row
from rlhf.study.spec import VALUE, Spec

_ELSEWHERE = "no grid of the task has such a cell"
HOLDS, NOT, UNDECIDED = "holds", "does not hold", "undecided"
_MANY = 1000  # more seeds are not counted


class Judged(NamedTuple):
    """A claim with its verdict, the numbers that the verdict is made of, and its task; None: all tasks."""

    said: str
    formula: str
    task: str | None
    verdict: str
    numbers: str
    contrasts: Mapping[str, Contrast] = {}  # the differences that it is about, of all seeds


def judged(results: Results) -> Iterator[Judged]:
    """Yield the claims with their verdicts: for each task whose grids have the cells, or for all together."""
    for said, text in results.spec.claims.items():
        formula = read_formula(text)
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
        above = [max(p(c, -limit, "greater"), p(c, limit, "less")) for c in contrasts.values()]
        below = [
            min(p(c, -limit, "less", family), p(c, limit, "greater", family)) for c in contrasts.values()
        ]
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
        return HOLDS if exact else f"{HOLDS} (by t test, not confirmed exactly)"
    if any(p < level / 2 and not doubt for p, doubt in zip(below, sides[1], strict=True)):
        return NOT
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


def call_own(spec: Spec, key: str, address: str, rows: Sequence[Row]) -> Any:
    """Return what a function of the user, <file>.py:<function> or <module>:<function>, returns for rows.

    Args:
        spec: the study; the path of a file is relative to the folder of its file.
        key: the key of the address.
        address: the function.
        rows: the rows of a study.

    Raises:
        UserError: there is no such function, or it failed.
    """
    place, _, name = address.rpartition(":")
    try:
        if place.endswith(".py"):
            return run_path(str(spec.file.parent / place))[name](rows)
        return load_function(key, address, None)(rows)
    except (Exception, SystemExit) as error:
        got = f"{one_line(error)}{place_in_code(error, __file__)}"
        raise UserError(f"{spec.at(key)} must be a function of rows, got {got}; correct {address}") from None


def _own_differences(spec: Spec, key: str, address: str, rows: Sequence[Row]) -> dict[str, Contrast]:
    """Return the differences that a function of the user makes of rows."""
    found = call_own(spec, key, address, rows)
    try:
        samples = {str(name): np.array([values], float) for name, values in found.items()}
    except (AttributeError, TypeError, ValueError):
        samples = {}
    if not samples or not all(x.ndim == 2 and np.isfinite(x).all() for x in samples.values()):
        rule = f"{spec.at(key)} must return differences by name, one number for each seed"
        raise UserError(f'{rule}, got {shortened(repr(found), 60)}; return {{"a - b": [0.1, -0.2, 0.3]}}')
    return {name: Contrast(x, [1.0], True, 0) for name, x in samples.items()}


def _verdict(
    results: Results, formula: Formula, tasks: Sequence[str], key: str
) -> tuple[str, str, Mapping[str, Contrast]]:
    """Return verdict, numbers and differences of a claim about tasks; `key`: that of the study file."""
    chosen, left, terms = "", formula.left, {}  # type: str, Side | None, dict[str, list[Term]]
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
        contrasts = _own_differences(results.spec, key, formula.text, results.rows)
    if not contrasts or not all(map(results.complete, terms.values())):
        return f"{UNDECIDED}: a run failed, or does not have the value", "", {}
    contrasts = {name: contrasts[name] for name in distinct({n: c.samples for n, c in contrasts.items()})}
    told = about = contrasts
    remark = ""
    if left is not formula.left and left is not None:
        side, signs = Side(VALUE, (), left.levels), {n: task.sign for n, task in results.spec.tasks.items()}
        n = min(each.seeds for each in contrasts.values())
        half = n // 2 if n // 2 >= FEWEST else 0  # seeds that choose the method
        values = {}
        for name in contrasts:
            cells = _terms(results, side, name, {}, tasks, 1.0)
            scores = [each._replace(weight=each.weight * signs[each.cell.task]) for each in cells]
            values[name] = results.contrast(scores).values[: half or None].mean()
        chosen = max(values, key=values.__getitem__)
        told, remark = {chosen: contrasts[chosen]}, f", chosen afterwards among {len(contrasts)}"
        about = told
        if half:
            contrasts = told = {chosen: replace(told[chosen], samples=told[chosen].samples[:, half:])}
            chosen, remark = "", f", chosen by {half} seeds and judged by {n - half}"
    decimals = 4 if left and left.quantity == SLOPE else 3
    numbers = ", ".join(f"{name} {shown(each.estimate, decimals)}" for name, each in told.items()) + remark
    fallen = ", ".join(f"{each.collapsed} in {name}" for name, each in told.items() if each.collapsed)
    numbers += f"; collapsed runs: {fallen}" if fallen else ""
    limit, within = formula.number, formula.sign == "within"
    if formula.sign == "<":
        contrasts, limit = {name: -each for name, each in contrasts.items()}, -limit
    return decided(contrasts, limit, results.level, chosen=chosen, within=within), numbers, about


def _differences(
    results: Results, formula: Formula, left: Side, tasks: Sequence[str]
) -> dict[str, list[Term]]:
    """Return left minus factor * right of a claim, by name, for all methods and for all values of `every`."""
    right, axes, found = formula.right, results.spec.axes, {}
    for method, levels in product(left.methods, product(*(axes[axis].values for axis in left.every))):
        every = dict(zip(left.every, levels, strict=True))
        place = "".join(f" {axis}={value}" for axis, value in every.items())
        terms = _terms(results, left, method, every, tasks, 1.0)
        if right is None:
            found[method + place] = terms
            continue
        same = right.methods == (SAME,)
        for other in [method] if same else [each for each in right.methods if each != method]:
            name = method if same else f"{method} - {other}"
            found[name + place] = terms + _terms(results, right, other, every, tasks, -formula.factor)
    return found


def _terms(
    results: Results, side: Side, method: str, every: Mapping[str, str], tasks: Sequence[str], weight: float
) -> list[Term]:
    """Return a side of a claim about a method as a sum of cells, the mean over the tasks."""
    levels = {**side.levels, **every}
    axis = side.over or next(iter(levels), "")
    return [
        term._replace(weight=weight / len(tasks) * term.weight)
        for task in tasks
        for term in results.terms(side.quantity, cell_of(results.spec, task, method, levels), axis)
    ]
