"""Findings in words, only where an interval over all seeds supports them (see `analysis.side`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.atlas import analysis
from benchmarks.atlas.analysis import Estimate
from benchmarks.atlas.claims import WITHIN, text
from benchmarks.atlas.design import Cell
from benchmarks.atlas.study import Study

BASES = {  # corrected method -> the same objective without correction
    "dpo+is": "dpo",
    "dpo+wpo": "dpo",
    "m2po": "grpo",
    "geometric": "grpo",
    "truncate": "grpo",
}


def findings(study: Study) -> list[str]:
    """Return the findings of each task at the largest lag and the largest N."""
    design, found = study.design, []
    for task in design.tasks:
        for at in ({"lag": max(design.lags)}, {"minibatches": max(design.minibatches)}):
            found += list(of_column(study, task, at))
    return found or ["No difference is supported by an interval over all seeds."]


def of_column(study: Study, task: str, at: dict[str, int]) -> Iterator[str]:
    """Yield the methods that lose, those that lose little, and the corrections that gain, in one column."""
    design, label = study.design, study.design.tasks[task].label
    where = f"`{task}`, " + (f"lag {at['lag']}" if "lag" in at else f"N = {at['minibatches']}")
    cells = {method: design.cell(task, method, **at) for method in design.methods}
    losses = known({method: study.loss(cell) for method, cell in cells.items()})
    losing = {method: each for method, each in losses.items() if study.side(each) == 1}
    little = {method: each for method, each in losses.items() if study.side(each, WITHIN) == -1}
    gains = known({method: gain(study, cells, method) for method in BASES if method in cells})
    differing = {method: each for method, each in gains.items() if study.side(each)}
    ends = known(
        {method: analysis.estimate(list(study.values(cell).values())) for method, cell in cells.items()}
    )
    if losing:
        yield f"{where}: these methods lose {label}: {named(losing, ends)}."
    if little:
        yield f"{where}: these methods lose at most {WITHIN} of {label}: {named(little, ends)}."
    for method, each in differing.items():
        better = "higher" if study.side(each) == 1 else "lower"
        yield f"{where}: `{method}` ends {better} than `{BASES[method]}`, by {text(each)} of {label}."


def gain(study: Study, cells: dict[str, Cell], method: str) -> Estimate | None:
    """Return the value of a corrected method minus that of its base, over the seeds that both have."""
    base = cells.get(BASES[method])
    if base is None:
        return None
    return analysis.estimate(analysis.differences(study.values(cells[method]), study.values(base)))


def known(found: dict[str, Estimate | None]) -> dict[str, Estimate]:
    """Return the estimates that exist."""
    return {method: each for method, each in found.items() if each is not None}


def named(losses: dict[str, Estimate], ends: dict[str, Estimate]) -> str:
    """Return methods with their losses and final values, the largest loss first.

    The final value shows whether a method that loses nothing has learned anything.
    """
    ordered = sorted(losses, key=lambda method: -losses[method].centre)
    return ", ".join(f"`{each}` {text(losses[each])} to {ends[each].centre:.3f}" for each in ordered)
