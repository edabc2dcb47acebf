"""Print the tables of a benchmark: python -m benchmarks.against_trl.table [--markdown] [file of runs].

A ratio is above 1 if this project is better: TRL / ours for costs (seconds, memory), ours / TRL for rates
(episodes or tokens per second).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.against_trl.meter import PHASES
from benchmarks.against_trl.work import ENVIRONMENTS, EPISODES, LENGTHS, SAMPLES, SIDES, WORKS, Case

RUNS = Path("outputs/bench/runs.jsonl")
GPU_RUNS = RUNS.with_name("gpu.jsonl")
UNITS = {"cpu_s": "CPU-seconds", "wall_s": "seconds"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of a value over repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Return the spread of `values`."""
        return Spread(median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """Return the median, followed by the bounds in parentheses if they differ."""
        middle, low, high = (f"{x:{form}}" for x in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table with a title; cells are texts."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table as Markdown, the first column left-aligned, others right-aligned."""
        rule = ["---", *["--:"] * (len(self.columns) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows))

    def show(self) -> None:
        """Print the table to the terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for row in self.rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the runs in `file`; empty if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def figures(run: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one run, per update unless the name is a rate."""
    case, found = Case(**run["case"]), run["figures"]
    tokens = EPISODES * WORKS[case.work].response
    return {
        "episodes_per_cpu_s": EPISODES / found["cpu_s"],
        "episodes_per_s": EPISODES / found["wall_s"],
        "tokens_per_s": tokens / found["phases"]["generate"]["wall_s"],
        "cpu_s": found["cpu_s"],
        "wall_s": found["wall_s"],
        "memory_mib": found["memory"]["above_mib"],
        **{f"{phase}_cpu_s": found["phases"][phase]["cpu_s"] for phase in PHASES},
        **{f"{phase}_wall_s": found["phases"][phase]["wall_s"] for phase in PHASES},
    }


def spreads(runs: list[dict[str, Any]]) -> dict[str, Spread]:
    """Return the spread of each figure over the runs of one case and side."""
    each = list(map(figures, runs))
    return {name: Spread.of([found[name] for found in each]) for name in (each[0] if each else ())}


@dataclass(frozen=True, slots=True)
class Pair:
    """The runs of a case by this project and by TRL. A side without runs has empty figures."""

    case: str
    rival: str  # of SIDES
    runs: dict[str, list[dict[str, Any]]]  # by side
    ours: dict[str, Spread]
    trl: dict[str, Spread]

    @property
    def name(self) -> str:
        """The name of the case, with a note if TRL is as released."""
        return f"`{self.case}`" + (", as released" if self.rival == "trl-released" else "")

    @property
    def repeats(self) -> str:
        """The number of runs; two numbers (ours, TRL) if they differ."""
        ours, trl = (len(self.runs.get(side, [])) for side in ("ours", self.rival))
        return str(ours) if ours == trl else f"{ours}, {trl}"

    def ratio(self, figure: str) -> Spread | None:
        """Return how many times better this project is: ratio of medians, bounds from the extremes."""
        if not (self.ours and self.trl):
            return None
        more, less = self.trl[figure], self.ours[figure]
        if "_per_" in figure:
            more, less = less, more
        return Spread(more.median / less.median, more.low / less.high, more.high / less.low)

    def compared(self, figure: str, form: str, bounds: bool = True) -> list[str]:
        """Return ours, TRL and the ratio as texts; `bounds`: add the bounds of ours and TRL."""
        both = [side.get(figure) for side in (self.ours, self.trl)]
        texts = [(it.text(form) if bounds else f"{it.median:{form}}") if it else "" for it in both]
        if (times := self.ratio(figure)) is None:
            return [*texts, ""]
        middle, *rest = times.text(".2f").split(" ", 1)
        return [*texts, " ".join([f"**{middle}**", *rest])]


def least(runs: list[dict[str, Any]], unit: str) -> float:
    """Return the time of the fastest update of all `runs`. Disturbances only add time."""
    return float(min(update[unit] for run in runs for update in run["figures"]["each"]))


def pairs(runs: list[dict[str, Any]]) -> list[Pair]:
    """Return each case against TRL, and against TRL as released if measured, sorted by part and algorithm."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda run: place(Case(**run["case"]))):
        found.setdefault(Case(**run["case"]).name, {}).setdefault(run["side"], []).append(run)
    return [
        Pair(case, rival, sides, spreads(sides.get("ours", [])), spreads(sides.get(rival, [])))
        for case, sides in found.items()
        for rival in SIDES[1:]
        if rival in sides or (rival == "trl" and "trl-released" not in sides)
    ]


def place(case: Case) -> tuple[int, int, int]:
    """Return the sort key of a case in a table."""
    return list(LENGTHS).index(case.part), list(SAMPLES).index(case.algo), case.threads


def sheets(runs: list[dict[str, Any]]) -> Iterator[Sheet]:
    """Yield all tables: ratios, throughput, cost of an update, fastest update, and cost by phase.

    Tables of runs on a GPU have no CPU-seconds.
    """
    found = pairs(runs)
    units = ["wall_s"] if any(run["case"].get("gpu") for run in runs) else list(UNITS)
    ratios = {
        **({"episodes/CPU-s": "episodes_per_cpu_s"} if "cpu_s" in units else {}),
        "episodes/s": "episodes_per_s",
        "tokens/s": "tokens_per_s",
        "memory": "memory_mib",
        **{phase: f"{phase}_{units[0]}" for phase in PHASES},
    }
    times = [[pair.ratio(figure) for figure in ratios.values()] for pair in found]
    yield Sheet(
        f"How many times better than TRL; phases by {UNITS[units[0]]}",
        ["case", "runs", *ratios],
        [
            [pair.name, pair.repeats, *(f"{it.median:.2f}" if it else "" for it in own)]
            for pair, own in zip(found, times, strict=True)
        ],
    )

    def sheet(title: str, kinds: dict[str, tuple[str, str]], bounds: bool = True) -> Sheet:
        heads = [f"{head}, {side}" for head in kinds for side in ("ours", "TRL", "ratio")]
        rows = [
            [pair.name, pair.repeats, *chain(*(pair.compared(*kind, bounds) for kind in kinds.values()))]
            for pair in found
        ]
        return Sheet(title, ["case", "runs", *heads], rows)

    yield sheet(
        "Throughput; tokens/s: generated tokens per second of sampling",
        {
            **({"episodes/CPU-s": ("episodes_per_cpu_s", ".1f")} if "cpu_s" in units else {}),
            "episodes/s": ("episodes_per_s", ".1f"),
            "tokens/s": ("tokens_per_s", ".0f"),
        },
    )
    yield sheet(
        f"An update of {EPISODES} episodes; MiB: peak above the memory in use at the start",
        {
            **({"CPU-s": ("cpu_s", ".2f")} if "cpu_s" in units else {}),
            "seconds": ("wall_s", ".2f"),
            "MiB": ("memory_mib", ".0f"),
        },
    )
    both = [(pair, pair.runs["ours"], pair.runs[pair.rival]) for pair in found if pair.ours and pair.trl]
    lows = [(pair.name, *(least(side, units[0]) for side in sides)) for pair, *sides in both]
    yield Sheet(
        f"The fastest update (least time), {UNITS[units[0]]}; disturbances only add time",
        ["case", "least, ours", "least, TRL", "least, ratio"],
        [[name, f"{ours:.3f}", f"{trl:.3f}", f"**{trl / ours:.2f}**"] for name, ours, trl in lows],
    )
    for unit in units:
        by_phase = {phase: (f"{phase}_{unit}", ".2f") for phase in PHASES}
        yield sheet(f"An update by phase, {UNITS[unit]}", by_phase, bounds=False)


def origin(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return machines, versions, commits and commands of `runs`, and the largest load and steal."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run["figures"]["versions"].items():
            own = name == "trl" and run["case"]["algo"] in ENVIRONMENTS  # PPO needs an older TRL
            versions.setdefault(f"trl for {run['case']['algo']}" if own else name, []).append(version)
    return {
        "machines": distinct([run["machine"] for run in runs]),
        "versions": {name: distinct(found) for name, found in sorted(versions.items())},
        "commits": distinct([run["git"] for run in runs]),
        "commands": distinct([run["command"] for run in runs]),
        "load": max(run["load"] for run in runs),
        "stolen": max(run["figures"].get("stolen", 0.0) for run in runs),
    }


def distinct(values: list[Any]) -> list[Any]:
    """Return each value once, in order."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def results(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all results: `origin`, and per case the counts, the figures of each side and the ratios."""
    cases: dict[str, Any] = {}
    for pair in pairs(runs):
        case = cases.setdefault(pair.case, {"sides": {}, "ratios": {}})
        for side, found in (("ours", pair.ours), (pair.rival, pair.trl)):
            if found:
                last = pair.runs[side][-1]["figures"]
                case["sides"][side] = {
                    "repeats": len(pair.runs[side]),
                    "versions": last["versions"],
                    "counts": last["counts"],
                    "figures": {name: asdict(spread) for name, spread in found.items()},
                }
        ratios = {name: pair.ratio(name) for name in pair.ours}
        case["ratios"][pair.rival] = {name: asdict(times) for name, times in ratios.items() if times}
    return {**origin(runs), "cases": cases}


def show(runs: list[dict[str, Any]], markdown: bool) -> None:
    """Print the origin of the runs and all tables."""
    print(described(origin(runs)))
    for sheet in sheets(runs):
        if markdown:
            print(f"\n{sheet.title}:\n\n{sheet.markdown()}")
        else:
            plain = [[cell.replace("`", "").replace("**", "") for cell in row] for row in sheet.rows]
            Sheet(sheet.title, sheet.columns, plain).show()


def described(origin: dict[str, Any]) -> str:
    """Return an origin as text."""
    machines = "; ".join(
        f"{it['gpu'] + ', ' if 'gpu' in it else ''}{it['processor']}, {it['cores']} cores, "
        f"{it['memory_gib']} GiB, Python {it['python']}"
        for it in origin["machines"]
    )
    versions = ", ".join(f"{name} {' and '.join(found)}" for name, found in origin["versions"].items())
    commits = " and ".join(
        it["commit"][:7] + (" with changes" if it["changed"] else "") for it in origin["commits"] if it
    )
    load = f"load before a run at most {origin['load']:.1f}"
    stolen = f"steal at most {origin['stolen']:.0%} of a run"
    commands = "".join(f"\n    {command}" for command in origin["commands"])
    return f"{machines}; {versions}; commit {commits}; {load}, {stolen}; commands:\n{commands}\n"


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=RUNS, help=f"file of runs; default: {RUNS}")
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown, as in docs/results/benchmarks.md"
    )
    args = parser.parse_args()
    if not (runs := read(args.file)):
        parser.error(f"{args.file} must contain runs (the tables show them), got none; run make bench")
    show(runs, args.markdown)


if __name__ == "__main__":
    main()
