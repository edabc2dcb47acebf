"""Claims of the paper (arXiv 2410.18252) and goals of the study, each with a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.atlas import analysis
from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study
from rlhf.core import statistics
from rlhf.core.statistics import HOLDS, LEVEL, NOT, UNDECIDED

PAPER = ("dpo", "ppo", "rloo", "bok")  # the methods of the paper
WITHIN, LOSES = 0.02, 0.1  # goals: largest loss of the best method, smallest loss of uncorrected PPO
MISSING = f"{UNDECIDED}: runs missing"


class Claim(NamedTuple):
    """A claim, its verdict, and the numbers that the verdict is made of."""

    text: str
    verdict: str
    numbers: str


def judged(
    study: Study,
    said: str,
    what: str,
    samples: Mapping[str, Sequence[float]],
    limit: float = 0.0,
    decimals: int = 3,
    cells: Iterable[Cell] = (),
) -> Claim:
    """Return the claim that the mean of every sample is above a limit.

    Args:
        study: the study.
        said: the claim in words.
        what: what a value of the samples is.
        samples: one value per seed, by name.
        limit: the limit.
        decimals: decimals of the printed values.
        cells: cells whose collapsed runs are named beside the values.
    """
    numbers = ", ".join(f"{name} {text(each, decimals)}" for name, each in samples.items())
    fallen = {cell.method: count for cell in cells if (count := study.collapsed(cell))}
    if fallen:
        numbers += f"; collapsed runs: {', '.join(f'{name} {count}' for name, count in fallen.items())}"
    word = MISSING
    if samples and all(len(each) == len(study.design.seeds) for each in samples.values()):
        word = statistics.verdict(samples, limit).word
    return Claim(said, word, f"{what}: {numbers}")


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
    cells = {method: cell._replace(method=method) for method in PAPER if method in study.design.methods}
    own = study.losses(cell)
    others = {
        method: analysis.differences(study.losses(each), own)
        for method, each in cells.items()
        if method != "dpo"
    }
    said = f"Online DPO loses least of the paper's methods ({task}, {name})"
    return judged(study, said, "loss minus that of dpo", others, cells=cells.values())


def log_n(study: Study, task: str) -> Claim:
    """Return the claim that the methods of the paper get worse with log N."""
    design = study.design
    falls = {}
    for method in PAPER:
        if method in design.methods:
            cells = {n: design.cell(task, method, minibatches=n) for n in design.minibatches}
            slopes = analysis.slopes({n: study.values(cell) for n, cell in cells.items()})
            falls[method] = [-slope for slope in slopes]
    said = f"The {design.tasks[task].label} falls with log N ({task})"
    return judged(study, said, "fall per doubling of N", falls, decimals=4)


def larger_k(study: Study) -> Claim:
    """Return the claim that a larger K helps, with the same number of samples."""
    design, found = study.design, {}
    for method in design.scale_methods:
        for lag in design.scale_lags:
            base = design.cell(design.scale_task, method, lag)
            for k in design.scale_samples:
                gains = analysis.differences(study.values(base._replace(samples=k)), study.values(base))
                found[f"{method} lag {lag} K {k}"] = gains
    return judged(study, "A larger K gives a higher win rate", "gain", found)


def larger_model(study: Study) -> Claim:
    """Return the claim that larger models lose less at the largest lag."""
    design, found = study.design, {}
    lag = max(design.scale_lags, default=0)
    for method in design.scale_methods:
        base = design.cell(design.scale_task, method, lag)
        own = study.losses(base)
        for width in design.scale_widths:
            smaller = study.losses(base._replace(width=width))
            found[f"{method} width {width} vs. {base.width}"] = analysis.differences(smaller, own)
    said = f"A larger model loses less at lag {lag}"
    return judged(study, said, "loss of the smaller minus the larger", found)


def goals(study: Study, task: str) -> Iterator[Claim]:
    """Yield the goals: the method with the highest value loses at most `WITHIN`, and PPO at least `LOSES`."""
    design, lag = study.design, max(study.design.lags)
    cells = {method: design.cell(task, method, lag) for method in design.methods}
    yield best_loses_little(
        study, f"Goal: the best method at lag {lag} loses at most {WITHIN} ({task})", cells
    )
    said = f"Goal: uncorrected PPO loses at least {LOSES} at lag {lag} ({task})"
    ppo = cells.get("ppo")
    losses = {"ppo": list(study.losses(ppo).values())} if ppo else {}
    yield judged(study, said, "loss", losses, LOSES, cells=[ppo] if ppo else [])


def best_loses_little(study: Study, said: str, cells: Mapping[str, Cell]) -> Claim:
    """Return the claim that the method with the highest mean loses at most `WITHIN`.

    The method is chosen by the same seeds, so its p-value is corrected for the number of distinct methods.
    """
    table = study.table(list(cells.values()))
    if table is None:
        return Claim(said, MISSING, "-")
    best = list(cells)[int(table.mean(1).argmax())]
    losses = {method: list(study.losses(cell).values()) for method, cell in cells.items()}
    names = statistics.distinct(losses)
    corrected = statistics.holm(
        [statistics.p_value(losses[name], WITHIN, "less", len(names)) for name in names]
    )
    own = next(i for i, same in enumerate(names.values()) if best in same)
    p = statistics.p_value(losses[best], WITHIN, "greater")
    word = HOLDS if corrected[own] < LEVEL / 2 else NOT if p < LEVEL / 2 else UNDECIDED
    return Claim(said, word, f"loss: {best} {text(losses[best])}, chosen afterwards among {len(names)}")


def text(values: Sequence[float], decimals: int = 3) -> str:
    """Return the mean of values with its t interval; "-" without values."""
    if not values:
        return "-"
    each = statistics.mean_interval(values)
    centre, low, high = (f"{round(value, decimals) + 0.0:.{decimals}f}" for value in each[:3])  # no "-0.000"
    return centre if each.seeds < 2 else f"{centre} ({low}, {high})"
