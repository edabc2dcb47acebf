"""Tables of what was measured: python -m benchmarks.against_trl.table [--markdown] [file of runs].

Ratios are above 1 where this project does better: TRL's figure over ours for what is spent (seconds, memory),
ours over TRL's for what is done in a second.
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
from benchmarks.against_trl.work import EPISODES, LENGTHS, SAMPLES, SIDES, WORKS, Case

RUNS = Path("outputs/bench/runs.jsonl")
GPU_RUNS = RUNS.with_name("gpu.jsonl")
UNITS = {"cpu_s": "CPU-seconds", "wall_s": "seconds"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Median, least and largest."""
        return Spread(median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """The median and, where they differ from it, the bounds in brackets."""
        middle, low, high = (f"{x:{form}}" for x in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of texts."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As Markdown, the first column left, figures right."""
        rule = ["---", *["--:"] * (len(self.columns) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows))

    def show(self) -> None:
        """In the terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for row in self.rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def read(file: Path) -> list[dict[str, Any]]:
    """The runs in `file`."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def figures(run: dict[str, Any]) -> dict[str, float]:
    """The figures of one run: of an update where nothing else is said."""
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
    """By figure, over the runs of one case and side."""
    each = list(map(figures, runs))
    return {name: Spread.of([found[name] for found in each]) for name in (each[0] if each else ())}


@dataclass(frozen=True, slots=True)
class Pair:
    """The runs of a case by this project and by TRL; a side that was not measured has none."""

    case: str
    rival: str  # of SIDES
    runs: dict[str, list[dict[str, Any]]]  # by side
    ours: dict[str, Spread]
    trl: dict[str, Spread]

    @property
    def name(self) -> str:
        """The case, and whether TRL is as released."""
        return f"`{self.case}`" + (", as released" if self.rival == "trl-released" else "")

    @property
    def repeats(self) -> str:
        """Of both sides, or ours and TRL's where they differ."""
        ours, trl = (len(self.runs.get(side, [])) for side in ("ours", self.rival))
        return str(ours) if ours == trl else f"{ours}, {trl}"

    def ratio(self, figure: str) -> Spread | None:
        """How many times better this project does, of medians; its bounds are of the extremes."""
        if not (self.ours and self.trl):
            return None
        more, less = self.trl[figure], self.ours[figure]
        if "_per_" in figure:
            more, less = less, more
        return Spread(more.median / less.median, more.low / less.high, more.high / less.low)

    def compared(self, figure: str, form: str, bounds: bool = True) -> list[str]:
        """Ours, TRL's and the ratio as texts; with or without the bounds of the first two."""
        both = [side.get(figure) for side in (self.ours, self.trl)]
        texts = [(it.text(form) if bounds else f"{it.median:{form}}") if it else "" for it in both]
        if (times := self.ratio(figure)) is None:
            return [*texts, ""]
        middle, *rest = times.text(".2f").split(" ", 1)
        return [*texts, " ".join([f"**{middle}**", *rest])]


def least(runs: list[dict[str, Any]], unit: str) -> float:
    """What the update took that took least, over all `runs`: noise only adds."""
    return float(min(update[unit] for run in runs for update in run["figures"]["each"]))


def pairs(runs: list[dict[str, Any]]) -> list[Pair]:
    """Every case against TRL, and against TRL as released where that was measured; by part and algorithm."""
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
    """Where a case stands in a table."""
    return list(LENGTHS).index(case.part), list(SAMPLES).index(case.algo), case.threads


def sheets(runs: list[dict[str, Any]]) -> Iterator[Sheet]:
    """All ratios; how much is done in a second, what an update costs, and which part costs what.

    Of runs on a GPU there is nothing in CPU-seconds.
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
        "Throughput; tokens are those generated, while generating",
        {
            **({"episodes/CPU-s": ("episodes_per_cpu_s", ".1f")} if "cpu_s" in units else {}),
            "episodes/s": ("episodes_per_s", ".1f"),
            "tokens/s": ("tokens_per_s", ".0f"),
        },
    )
    yield sheet(
        f"An update of {EPISODES} episodes; MiB above what was in use at the start",
        {
            **({"CPU-s": ("cpu_s", ".2f")} if "cpu_s" in units else {}),
            "seconds": ("wall_s", ".2f"),
            "MiB": ("memory_mib", ".0f"),
        },
    )
    both = [(pair, pair.runs["ours"], pair.runs[pair.rival]) for pair in found if pair.ours and pair.trl]
    lows = [(pair.name, *(least(side, units[0]) for side in sides)) for pair, *sides in both]
    yield Sheet(
        f"The update that took least, {UNITS[units[0]]}; what disturbs a machine only adds to it",
        ["case", "least, ours", "least, TRL", "least, ratio"],
        [[name, f"{ours:.3f}", f"{trl:.3f}", f"**{trl / ours:.2f}**"] for name, ours, trl in lows],
    )
    for unit in units:
        by_phase = {phase: (f"{phase}_{unit}", ".2f") for phase in PHASES}
        yield sheet(f"An update by phase, {UNITS[unit]}", by_phase, bounds=False)


def origin(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Where `runs` come from: machines, versions, commits, commands; the largest load before a run
    and the largest share that the host took of one."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run["figures"]["versions"].items():
            own = name == "trl" and run["case"]["algo"] == "ppo"  # PPO has a TRL of its own
            versions.setdefault("trl for ppo" if own else name, []).append(version)
    return {
        "machines": distinct([run["machine"] for run in runs]),
        "versions": {name: distinct(found) for name, found in sorted(versions.items())},
        "commits": distinct([run["git"] for run in runs]),
        "commands": distinct([run["command"] for run in runs]),
        "load": max(run["load"] for run in runs),
        "stolen": max(run["figures"].get("stolen", 0.0) for run in runs),
    }


def distinct(values: list[Any]) -> list[Any]:
    """Each once, in order."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def results(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All figures: `origin`, and by case the work done, each side's medians and bounds, and the ratios."""
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
    """Print where the runs come from, and the tables."""
    print(described(origin(runs)))
    for sheet in sheets(runs):
        if markdown:
            print(f"\n{sheet.title}:\n\n{sheet.markdown()}")
        else:
            plain = [[cell.replace("`", "").replace("**", "") for cell in row] for row in sheet.rows]
            Sheet(sheet.title, sheet.columns, plain).show()


def described(origin: dict[str, Any]) -> str:
    """An origin in words."""
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
    stolen = f"at most {origin['stolen']:.0%} of one taken by the host"
    commands = "".join(f"\n    {command}" for command in origin["commands"])
    return f"{machines}; {versions}; commit {commits}; {load}, {stolen}; by\n{commands}\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--markdown", action="store_true", help="for docs/benchmarks.md")
    words = parser.parse_args()
    if not (runs := read(words.file)):
        parser.error(f"{words.file} must hold runs (tables are made of them), and holds none; run make bench")
    show(runs, words.markdown)


if __name__ == "__main__":
    main()
