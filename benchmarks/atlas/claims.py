"""Claims of the paper (arXiv 2410.18252) and goals of the study, each with a verdict from intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.atlas import analysis
from benchmarks.atlas.analysis import Estimate
from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study

PAPER = ("dpo", "ppo", "rloo", "bok")  # the methods of the paper
WITHIN, LOSES = 0.02, 0.1  # goals: largest loss of the best method, smallest loss of uncorrected PPO
HOLDS, NOT, UNDECIDED, MISSING = "holds", "does not hold", "undecided", "undecided: runs missing"


class Claim(NamedTuple):
    """A claim, its verdict, and the numbers that the verdict is made of."""

    text: str
    verdict: str
    numbers: str


def verdict(sides: Sequence[int | None]) -> str:
    """Return the verdict of a claim, given the side of each interval (see `analysis.side`).

    The claim holds if all intervals are above the limit, does not hold if one interval is below, and is
    undecided otherwise.
    """
    if sides and all(side == 1 for side in sides):
        return HOLDS
    if -1 in sides:
        return NOT
    return UNDECIDED if sides and None not in sides else MISSING


def claims(study: Study) -> Iterator[Claim]:
    """Yield the claims and goals of a study."""
    design = study.design
    for task in design.tasks:
        for name, cell in extremes(study, task):
            yield most_robust(study, task, name, cell)
        yield log_n(study, task)
    yield larger_k(study)
    yield larger_model(study)
    for task in design.tasks:
        yield from goals(study, task)


def extremes(study: Study, task: str) -> Iterator[tuple[str, Cell]]:
    """Yield the cells of online DPO with the largest lag and with the largest N, each with its name."""
    lag, n = max(study.design.lags), max(study.design.minibatches)
    yield f"lag {lag}", study.design.cell(task, "dpo", lag=lag)
    yield f"N = {n}", study.design.cell(task, "dpo", minibatches=n)


def most_robust(study: Study, task: str, name: str, cell: Cell) -> Claim:
    """Return the claim that online DPO loses less than the other methods of the paper."""
    own = study.losses(cell)
    others = {
        method: analysis.estimate(analysis.differences(study.losses(cell._replace(method=method)), own))
        for method in PAPER
        if method != "dpo" and method in study.design.methods
    }
    numbers = [f"{method} {text(each)}" for method, each in others.items()]
    said = f"Online DPO loses least of the paper's methods ({task}, {name})"
    sides = [study.side(each) for each in others.values()]
    return Claim(said, verdict(sides), "loss minus that of dpo: " + ", ".join(numbers))


def log_n(study: Study, task: str) -> Claim:
    """Return the claim that the methods of the paper get worse with log N."""
    design = study.design
    found = {}
    for method in PAPER:
        if method in design.methods:
            cells = {n: design.cell(task, method, minibatches=n) for n in design.minibatches}
            falls = analysis.slopes({n: study.values(cell) for n, cell in cells.items()})
            found[method] = analysis.estimate([-fall for fall in falls])
    numbers = [f"{method} {text(each, 4)}" for method, each in found.items()]
    said = f"The {design.tasks[task].label} falls with log N ({task})"
    doublings = max(1.0, math.log2(max(design.minibatches) / min(design.minibatches)))
    sides = [study.side(each, scale=1 / doublings) for each in found.values()]
    return Claim(said, verdict(sides), "fall per doubling of N: " + ", ".join(numbers))


def larger_k(study: Study) -> Claim:
    """Return the claim that a larger K helps, with the same number of samples."""
    design, found = study.design, {}
    for method in design.scale_methods:
        for lag in design.scale_lags:
            base = design.cell(design.scale_task, method, lag)
            for k in design.scale_samples:
                gains = analysis.differences(study.values(base._replace(samples=k)), study.values(base))
                found[f"{method} lag {lag} K {k}"] = analysis.estimate(gains)
    numbers = ", ".join(f"{name} {text(each)}" for name, each in found.items())
    sides = [study.side(each) for each in found.values()]
    return Claim("A larger K gives a higher win rate", verdict(sides), f"gain: {numbers}")


def larger_model(study: Study) -> Claim:
    """Return the claim that larger models lose less at the largest lag."""
    design, found = study.design, {}
    lag = max(design.scale_lags, default=0)
    for method in design.scale_methods:
        base = design.cell(design.scale_task, method, lag)
        for width in design.scale_widths:
            smaller = study.losses(base._replace(width=width))
            found[f"{method} width {width} vs. {base.width}"] = analysis.estimate(
                analysis.differences(smaller, study.losses(base))
            )
    numbers = ", ".join(f"{name} {text(each)}" for name, each in found.items())
    said = f"A larger model loses less at lag {lag}"
    sides = [study.side(each) for each in found.values()]
    return Claim(said, verdict(sides), f"loss of the smaller minus the larger: {numbers}")


def goals(study: Study, task: str) -> Iterator[Claim]:
    """Yield the goals: the method with the highest value loses at most `WITHIN`, and PPO at least `LOSES`."""
    design, lag = study.design, max(study.design.lags)
    said = f"Goal: the best method at lag {lag} loses at most {WITHIN} ({task})"
    ranking = study.ranking(task, lag)
    best = min(ranking, key=lambda method: ranking[method]) if ranking else None
    loss = study.loss(design.cell(task, best, lag)) if best else None
    side = study.side(loss, WITHIN)
    yield Claim(said, verdict([None if side is None else -side]), f"{best} {text(loss)}" if best else "-")
    said = f"Goal: uncorrected PPO loses at least {LOSES} at lag {lag} ({task})"
    ppo = study.loss(design.cell(task, "ppo", lag)) if "ppo" in design.methods else None
    yield Claim(said, verdict([study.side(ppo, LOSES)]), f"ppo {text(ppo)}")


def text(each: Estimate | None, decimals: int = 3) -> str:
    """Return an estimate with its interval; "-" without values."""
    if each is None:
        return "-"
    centre = f"{each.centre:.{decimals}f}"
    return centre if each.count < 2 else f"{centre} ({each.low:.{decimals}f}, {each.high:.{decimals}f})"
