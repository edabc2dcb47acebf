"""Gold and proxy scores of a study over d = sqrt(KL): figure, fits, peaks, falls, rules that stop a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product, zip_longest
from typing import Any, NamedTuple

import numpy as np

from rlhf.core.overoptimization import Kind, Rule, fall, fit, peak_interval, peak_shift, regret, terms
from rlhf.core.statistics import Estimate
from rlhf.report.figures import Chart, Panel, trace
from rlhf.report.tables import Group
from rlhf.study.rows import FEWEST, Contrast, Results, Term, shown
from rlhf.study.spec import Cell, Quantity

# Step, KL, gold score, proxy score and standard deviation of the members, as rows name them.
_NAMES: dict[Kind, Sequence[str]] = {
    "rl": ("update", "eval/kl", "eval/gold_score", "eval/score", "eval/score_std"),
    "best_of_n": ("best_of/n", "best_of/kl", "best_of/gold_score", "best_of/score", ""),
}
_RULES: dict[Rule, str] = {"never": "no rule", "kl": "d", "proxy": "gain of the proxy", "members": "spread"}
_LEAST = 3  # evaluations above d = 0 without which nothing is fitted
_NEAR = 0.3  # evaluations below this d weigh most: the form of training has an infinite slope at 0


class Curve(NamedTuple):
    """The evaluations of the runs of a cell, or the best of n of its samples: arrays [seeds, steps].

    Seeds without all steps, such as runs that diverged, are left out.
    """

    cell: Cell
    name: str
    kind: Kind
    seeds: list[int]
    d: np.ndarray  # sqrt(KL); an estimate of the KL may be below 0
    gold: np.ndarray
    proxy: np.ndarray  # nan: the rows have none
    spread: np.ndarray  # of the members of an ensemble; nan: the rows have none
    fits: np.ndarray  # a, b, R^2, R^2 of a line [4, seeds]; no columns with too few seeds or evaluations
    peak: Estimate | None  # d at the maximum of the mean form, if it lies where there are data
    place: str  # the same as text


def curves(results: Results) -> dict[str, list[Curve]]:
    """Return the curves of each task that begin at the initial policy; none if the study shows none."""
    methods, found = [*results.spec.methods], {}  # type: list[str], dict[str, list[Curve]]
    cells = sorted(results.cells if results.spec.curves else (), key=lambda cell: methods.index(cell.method))
    for cell, (kind, names) in product(cells, _NAMES.items()):
        tables = {}
        for seed, row in sorted(results.cells[cell].items()):
            columns = (row.evaluations.get(x, ()) for x in names)
            table = np.array([*zip_longest(*columns)], float).reshape(-1, len(names))
            tables[seed] = table[~np.isnan(table[:, :3]).any(1)]
        steps = max((table[:, 0].tolist() for table in tables.values()), key=len)
        seeds = [seed for seed, table in tables.items() if table[:, 0].tolist() == steps]
        if len(steps) < 2 or steps[0] != (kind == "best_of_n"):
            continue
        _, kl, gold, proxy, spread = np.moveaxis(np.array([tables[seed] for seed in seeds]), 2, 0)
        d, fits, peak, place = np.sqrt(np.maximum(kl, 0)), np.empty((4, 0)), None, "-"
        if len(seeds) >= FEWEST and ((d > 0).sum(1) >= _LEAST).all():
            with np.errstate(all="ignore"):  # equal gold scores have no R^2
                line = [np.corrcoef(x[x > 0], y[x > 0])[0, 1] ** 2 for x, y in zip(d, gold, strict=True)]
            known = zip(d, gold, line, strict=True)
            fits = np.array([(*fit(x, y - y[0], kind), squared) for x, y, squared in known]).T
            peak, end = peak_interval(fits[:2], kind), d.mean(0).max()
            texts = [f"{x:.2f}" if x <= end else f"> {end:.2f}" for x in (peak or ())[:3]]
            place = "{} ({}, {})".format(*texts) if peak else "no peak"
            peak = peak if peak and peak.centre <= end else None
        name = str(cell).removeprefix(f"{cell.task} ") + " best of n" * (kind == "best_of_n")
        name += f" [{len(seeds)}/{len(tables)}]" if len(seeds) < len(tables) else ""
        curve = Curve(cell, name, kind, seeds, d, gold, proxy, spread, fits, peak, place)
        found.setdefault(cell.task, []).append(curve)
    return found


def _estimate(values: np.ndarray) -> Estimate:
    return Contrast(values[None], [1.0], True).estimate


def fitted(results: Results, found: Sequence[Curve]) -> list[list[str]]:
    """Return the table of curves, with headings."""
    spec = results.spec
    heads = ["curve", f"evaluations (0 < d < {_NEAR})", "d at the end", "proxy", "gold", "fall of gold"]
    lines = [[*heads, "a", "b", "R^2 (of a line)", "d at the peak", "minus that of the base"]]
    for curve in found:
        near = ((curve.d > 0) & (curve.d < _NEAR)).sum(1).max()
        line = [f"`{curve.name}`", f"{curve.d.shape[1]} ({near})", f"{curve.d[:, -1].mean():.2f}"]
        for first, last in (each.mean(0)[[0, -1]] for each in (curve.proxy, curve.gold)):
            line.append("-" if np.isnan(first + last) else f"{first:.2f} to {last:.2f}")
        if curve.fits.size:
            a, b, *squared = curve.fits
            means = [shown(each, 2) for each in (fall(curve.gold, curve.d)[1], _estimate(a), _estimate(b))]
            form, straight = np.median(squared, 1)
            worse = ", worse than a line" if form < straight else ""
            line += [*means, f"{form:.2f} ({straight:.2f}){worse}", curve.place]
        cell = curve.cell
        base = cell.at({name: axis.bases[cell.task] for name, axis in spec.axes.items()})
        base = cell.at({}, spec.methods[cell.method].base) if base == cell else base
        pair = [Term(1.0, cell, Quantity.VALUE), Term(-1.0, base, Quantity.VALUE)]
        for its in (c for c in found if (c.cell, c.kind) == (base, curve.kind) and c.peak and base != cell):
            paired = curve.seeds == its.seeds and results.contrast(pair).paired
            shift = curve.peak and peak_shift(curve.fits[:2], its.fits[:2], curve.kind, paired)
            line += [shown(shift, 2)] if shift else []
        lines.append(line + ["-"] * (len(lines[0]) - len(line)))
    return lines


def stopped(found: Sequence[Curve]) -> list[list[str]]:
    """Return the table of regrets of stopping rules, with headings, and the mean of all curves at the end."""
    trained = [each for each in found if each.kind == "rl" and each.fits.size]
    lines = [[f"`{each.name}`"] for each in trained] + [["mean"]]
    for rule in _RULES:
        every = []
        for curve, line in zip(trained, lines, strict=False):
            known = not np.isnan({"proxy": curve.proxy, "members": curve.spread}.get(rule, curve.d)).any()
            limits, lost, early = regret(rule, curve.d**2, curve.proxy, curve.gold, curve.spread)
            limit = f"; {abs(np.median(limits)):.2f}; {100 * early:.0f} %".replace("inf", "never")
            line.append(shown(_estimate(lost), 2) + limit * (rule != "never") if known else "-")
            every += [lost] if known and curve.seeds == trained[0].seeds else []
        mean = np.mean(every, 0) if len(every) == len(trained) > 0 else np.empty(0)
        lines[-1].append(shown(_estimate(mean), 2))
    return [["regret", *_RULES.values()], *lines] if trained else []


def drawn(name: str, found: Sequence[Curve]) -> Chart:
    """Return the figure: gold and proxy over d for each method, with the values of the axes side by side."""
    methods = dict.fromkeys(each.cell.method for each in found)
    parts = product(([each for each in found if each.cell.method == m] for m in methods), ("gold", "proxy"))
    return Chart(name, "", "", [Panel(partial(_draw, *each)) for each in parts])


def band(axes: Any, place: int, label: str, x: Iterable[float], estimates: Iterable[Estimate]) -> None:
    """Draw estimates with intervals and a legend; nothing if none is a number. `place`: of the colour."""
    import pandas

    points = pandas.DataFrame([each[:3] for each in estimates], columns=["y", "low", "high"]).assign(x=[*x])
    if points.y.notna().any():
        trace(axes, Group((), label, place, place), points)
        axes.lines[-1].set_label(label)
        axes.legend(fontsize=7, ncols=2)


def _draw(found: Sequence[Curve], what: str, axes: Any) -> None:
    """Draw scores with intervals; for gold also the fits (dotted), and intervals of their peaks (bars)."""
    for place, curve in enumerate(found):
        scores, x, label = getattr(curve, what), curve.d.mean(0), curve.name.partition(" ")
        band(axes, place, label[2] or label[0], x, map(_estimate, scores.T))
        if what == "gold" and curve.fits.size:
            style, d = {"color": axes.lines[-1].get_color()}, np.linspace(0, x.max(), 101)[1:]
            form = scores[:, 0].mean() + terms(d, curve.kind) @ curve.fits[:2].mean(1)
            axes.plot(d, form, linestyle=":", linewidth=1.2, **style)
            if curve.peak:
                ends = np.clip(curve.peak[1:3], 0, x.max())
                axes.plot(ends, [form.max()] * 2, linewidth=4, alpha=0.4, **style)
    axes.set(xlabel="d = sqrt(KL)", title=f"{found[0].cell.task}, {found[0].cell.method}: {what} score")
