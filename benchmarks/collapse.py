"""Selection of the limits of the collapse warning on one half of many runs, and its errors on the other half.

`selection` is the analysis of `studies/collapse.yaml`, so `rlhf study page` writes its result. It needs the
training metrics of single updates, which rows of studies do not have. After new runs:

    python -m benchmarks.collapse    write the updates of their run folders to studies/collapse/updates.npz

A run has collapsed if its loss became not finite, or if its win rate (the accuracy, on `arithmetic`) ends
`FALL` or more below its best value. The collapse is at the first evaluation after which the value stays that
low, so evaluations that are far apart make the lead look longer. The first half of the runs, in the order of
the file, which is random, selects the limits, so that the larger of the two error rates (missed
collapses, false alarms) is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlhf.core.formatting import wilson
from rlhf.report.runs import read_run
from rlhf.study.page import as_table
from rlhf.study.plan import ROW
from rlhf.study.rows import DIVERGED, Row, read_rows
from rlhf.training.recorder import LIMITS, SIGNALS, CollapseRule, Limits

UPDATES = Path(__file__).parents[1] / "studies/collapse/updates.npz"
FALL, EARLY = 0.1, 10  # of the value; updates between warning and collapse
METRICS = (  # that the rule reads
    *("objective/kl", "objective/entropy", "objective/response_tokens"),
    *("mismatch/kl", "mismatch/ess", "policy/grad_norm"),
)
GRID: dict[str, tuple[float | None, ...]] = {
    "kl": (None, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5),
    "rise": (None, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    "entropy": (None, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "ess": (None, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3),
    "gradient": (None, 1.5, 2.0, 3.0, 5.0, 10.0),
}
MEMORIES = (1.0, 2.0, 4.0, 8.0, 16.0)  # updates


@dataclass(frozen=True)
class Case:
    """A run: learning rate, training metrics of each update, and update of the collapse (infinity: none)."""

    rate: float
    updates: Sequence[dict[str, float]]
    collapse: float


def selection(rows: Sequence[Row], file: Path = UPDATES) -> str:
    """Return the selected limits and their errors as Markdown; each half needs collapsed and stable runs."""
    every = list(cases(rows, file))
    # methods that are equal with lag 0 make runs with equal updates
    distinct = list({repr(case.updates): case for case in every}.values())
    first, second = distinct[: len(distinct) // 2], distinct[len(distinct) // 2 :]
    limits = selected(first)
    rules = {"selected limits": limits, **{f"only `{name}`": selected(first, (name,)) for name in GRID}}
    rules["limits of this version"] = LIMITS
    columns = ["collapsed", f"warned >= {EARLY} updates before", "warned before", "lead, median (quartiles)"]
    columns += ["stable", "false alarms"]
    lines = [["selected limits", "selection", *_errors(first, limits)]]
    lines += [[name, "test", *_errors(second, each)] for name, each in rules.items()]
    rates = {rate: [x for x in second if x.rate == rate] for rate in sorted({x.rate for x in second})}
    falls = [case.collapse for case in distinct if case.collapse < math.inf]
    about = (
        f"{len(every)} runs; {len(every) - len(distinct)} of them repeat another run to the digit and are "
        f"left out. Of {len(distinct)} runs, {len(falls)} collapsed, {sum(at <= EARLY for at in falls)} of "
        f"them by update {EARLY}, which no warning can precede by {EARLY} updates. Selected: "
        f"`{_stated(limits)}`. This version: `{_stated(LIMITS)}`."
    )
    by_rate = [[f"{rate:g}", *_errors(some, limits)] for rate, some in rates.items()]
    tables = as_table([["rule", "half", *columns], *lines], left=2), as_table([["rate", *columns], *by_rate])
    said = "The selected limits on the second half, by learning rate:"
    return "\n\n".join(["## Selection", about, tables[0], said, tables[1]])


def cases(rows: Sequence[Row], file: Path) -> Iterator[Case]:
    """Yield the runs with a row in the order of the file of updates."""
    known = {row.run: row for row in rows}
    with np.load(file) as arrays:
        columns = {name: arrays[name].astype(float) for name in ("update", *METRICS)}
        ends = np.cumsum(arrays["rows"])
        for run, start, end in zip(arrays["run"].tolist(), ends - arrays["rows"], ends, strict=True):
            values = zip(*(column[start:end].tolist() for column in columns.values()), strict=True)
            if (row := known.get(run)) is not None:
                named = [dict(zip(columns, each, strict=True)) for each in values]
                updates = [{k: v for k, v in each.items() if not math.isnan(v)} for each in named]
                rate = row.tuned.get("optim.lr") or row.levels["rate"]
                collapse = updates[-1]["update"] if row.status == DIVERGED else math.inf
                yield Case(float(rate), updates, min(collapsed_at(row), collapse))


def collapsed_at(row: Row) -> float:
    """Return the update of the collapse of a run, as far as its evaluations show it; infinity: none."""
    values = row.evaluations["eval/gold_score" if row.task == "arithmetic" else "eval/win_rate"]
    best, found = -math.inf, math.inf
    for update, value in zip(row.evaluations["update"], values, strict=True):
        assert update is not None and value is not None
        found = math.inf if value > best - FALL + 1e-9 else min(found, update)
        best = max(best, value)
    return found


def crossings(case: Case, memory: float) -> dict[str, np.ndarray]:
    """Return, for each signal, the update at which its average first passes each limit of `GRID`."""
    rule = CollapseRule(limits=Limits(memory=memory))
    averages = []
    for each in case.updates:
        rule.observe(each)
        averages.append(dict(rule.averages))
    at = np.array([each["update"] for each in case.updates] + [math.inf])
    found = {}
    for signal, limits in GRID.items():
        values = np.array([average.get(signal, math.nan) for average in averages])[:, None]
        grid = np.array(limits, float)  # None becomes nan, which no value is beyond
        passed = values > grid if SIGNALS[signal].above else values < grid
        found[signal] = at[np.where(passed.any(0), passed.argmax(0), -1)]
    return found


def selected(found: Sequence[Case], signals: Sequence[str] = tuple(GRID)) -> Limits:
    """Return the limits of `signals` for which the larger of the two error rates is smallest.

    Among equal limits, those with fewer signals and then those with the longer lead are selected.
    """
    collapse = np.array([case.collapse for case in found])
    stable = np.isinf(collapse)
    sizes = [len(limits) if name in signals else 1 for name, limits in GRID.items()]
    places = np.indices(sizes).reshape(len(sizes), -1).T[1:]  # [combinations, signals]; not: no limit
    best: tuple[tuple[float, ...], Limits] | None = None
    for memory in MEMORIES:
        passed = [crossings(case, memory) for case in found]
        at = [np.stack([each[name] for each in passed], 1)[places[:, n]] for n, name in enumerate(GRID)]
        warned = np.minimum.reduce(at)  # [combinations, cases]
        leads = collapse[~stable] - warned[:, ~stable]
        recall, silent = np.mean(leads >= EARLY, axis=1), np.mean(np.isinf(warned[:, stable]), axis=1)
        used, lead = np.sum(places > 0, axis=1), np.median(leads, axis=1)
        ranks = np.stack([np.minimum(recall, silent), recall + silent, -used, lead], 1)
        top = ranks[np.lexsort(ranks.T[::-1])[-1]]
        if best is None or tuple(top) > best[0]:
            chosen = places[np.flatnonzero(np.all(ranks == top, axis=1))[0]]
            limits = {name: GRID[name][place] for name, place in zip(GRID, chosen, strict=True)}
            best = tuple(top), Limits(**limits, memory=memory)
    assert best is not None
    return best[1]


def measured(found: Sequence[Case], limits: Limits) -> tuple[list[float], list[bool]]:
    """Return the updates from warning to collapse (-infinity: none), and whether stable runs were warned."""
    leads, alarms = [], []
    for case in found:
        rule = CollapseRule(limits=limits)
        at = next((each["update"] for each in case.updates if rule.observe(each) is not None), math.inf)
        if case.collapse < math.inf:
            leads.append(case.collapse - at)
        else:
            alarms.append(at < math.inf)
    return leads, alarms


def _errors(found: Sequence[Case], limits: Limits) -> list[str]:
    """Return the errors of the rule as cells of a table, with 95 % Wilson intervals."""
    leads, alarms = measured(found, limits)
    warned = [lead for lead in leads if lead > 0]
    quartiles = "–"
    if warned:
        low, middle, high = np.quantile(warned, (0.25, 0.5, 0.75))
        quartiles = f"{middle:.0f} ({low:.0f} to {high:.0f})"
    counts = (sum(lead >= EARLY for lead in leads), leads), (len(warned), leads), (sum(alarms), alarms)
    early, before, false = (
        "{:.2f} [{:.2f}, {:.2f}]".format(part / len(of), *wilson(part / len(of), len(of))) if of else "–"
        for part, of in counts
    )
    return [str(len(leads)), early, before, quartiles, str(len(alarms)), false]


def _stated(limits: Limits) -> str:
    given = (f"{name}={value:g}" for name, value in asdict(limits).items() if value is not None)
    return f"Limits({', '.join(given)})"


def write_updates(folders: Sequence[Path], target: Path = UPDATES) -> None:
    """Write the metrics of single updates of the run folders of studies, as float16, to a file."""
    files = [file for folder in folders for file in folder.glob(f"runs/*/{ROW}")]
    runs = {read_rows(file)[0].run: file.parent for file in files}
    order = sorted(runs)  # digests, so the order is random
    trained = [[row for row in read_run(runs[run]).trained if "objective/kl" in row] for run in order]
    rows, largest = [row for each in trained for row in each], float(np.finfo(np.float16).max)
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in ("update", *METRICS)}
    packed = {name: np.clip(column, -largest, largest).astype(np.float16) for name, column in columns.items()}
    np.savez_compressed(target, run=np.array(order), rows=np.array([len(each) for each in trained]), **packed)


if __name__ == "__main__":
    write_updates([UPDATES.parent, UPDATES.parents[1] / "staleness"])
