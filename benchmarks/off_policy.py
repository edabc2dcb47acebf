"""The paper's study of off-policyness on the embedded task: its runs, then figure and tables of them.

    python -m benchmarks.off_policy            what is missing of the runs, then the document (make reproduce)
    python -m benchmarks.off_policy --draw     the document alone, from the runs that are there

An optimizer step has `STEP` prompts in every run and a run has equally many steps, so the one thing that
differs is how many steps are made on samples of the same weights: `schedule.minibatches`, the paper's N.
Of docs/results/off_policy.md only what stands between its two marks is written; the reading is by hand.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rlhf.checks.check import refuse
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.report.curves import Point
from rlhf.report.groups import Group
from rlhf.report.runs import Run, Status, find_runs
from rlhf.runs.folder import RunFolder

ALGORITHMS = ("dpo", "ppo", "rloo", "bok")
MINIBATCHES = (1, 2, 4, 8, 16, 32)
SEEDS = (1, 2)
STEP = 16  # prompts of an optimizer step
OUTPUTS = Path("outputs/off_policy")

RUNS = (
    f"algo={','.join(ALGORITHMS)}",
    "algo.samples_per_prompt=2",
    "schedule.total_episodes=2048",
    "schedule.eval_every=0.5",
    "schedule.save_every=0",
    "eval.prompts=512",
    f"seed={','.join(map(str, SEEDS))}",
    "backend.threads=1",
    f"output_dir={OUTPUTS}",
)
SWEEPS = (  # two processes at a time: two runs, or one with its generator in a process of its own
    (
        "sweep=minibatches",
        f"schedule.minibatches={','.join(map(str, MINIBATCHES))}",
        f'schedule.prompts_per_update="${{product:{STEP},${{schedule.minibatches}}}}"',
        *RUNS,
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    ),
    (
        "schedule.max_lag=1",
        f"schedule.prompts_per_update={STEP}",
        "generator.threads=1",
        "generator.annotate=false",
        *RUNS,
    ),
)

DOCUMENT = Path(__file__).parents[1] / "docs/results/off_policy.md"
FIGURE = DOCUMENT.parents[1] / "figures/off_policy.png"
MARKS = ("<!-- written by benchmarks/off_policy.py -->", "<!-- by hand from here -->")
METRICS = (  # heading, name, decimals
    ("Gold win-rate", "eval/win_rate", 3),
    ("Gold score", "eval/gold_score", 2),
    ("KL to the reference, nats per response", "eval/kl", 2),
)


class Setting(NamedTuple):
    """What the runs of a cell have in common; they differ in their seed."""

    algorithm: str
    minibatches: int
    max_lag: int = 0


COLUMNS = [*((n, 0) for n in MINIBATCHES), (1, 1)]  # minibatches, lag
Cells = dict[Setting, list[Run]]


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the document."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--draw", action="store_true", help="start no run")
    if not parser.parse_args(words).draw:
        for sweep in SWEEPS:
            if code := subprocess.run([sys.executable, "-m", "rlhf.train", "-m", *sweep]).returncode:
                sys.exit(code)
    try:
        cells = read(OUTPUTS)
        write_atomically(DOCUMENT, fill(DOCUMENT.read_text(encoding="utf-8"), written(cells)))
    except UserError as error:
        refuse(error.problems)
    draw(cells, FIGURE)
    print(tables(cells))


def read(folder: Path) -> Cells:
    """The finished runs of a folder by their setting, those of a setting by seed.

    Raises:
        UserError: there are no runs, or two of the same setting and seed, which differ in something else.
    """
    cells: Cells = {}
    for run in find_runs([str(folder)]).runs:
        if run.status is Status.finished:
            config = run.config
            keys = "algo.name", "schedule.minibatches", "schedule.max_lag"
            cells.setdefault(Setting(*(config[key] for key in keys)), []).append(run)
    for runs in cells.values():
        runs.sort(key=lambda run: run.seed)
        for run, other in zip(runs, runs[1:], strict=False):
            if run.seed == other.seed:
                raise UserError(
                    f"{folder} must hold one run of a setting and seed (others are no part of the study), "
                    f"got {run.folder.name} and {other.folder.name}; remove one of them"
                )
    if not cells:
        raise UserError(f"{folder} must hold finished runs, got none; run: make reproduce")
    return cells


# -- the document ----------------------------------------------------------------------------------------


def fill(document: str, text: str) -> str:
    """The document with `text` between its marks.

    Raises:
        UserError: it has not both marks, in their order.
    """
    before, first, rest = document.partition(MARKS[0])
    _, second, after = rest.partition(MARKS[1])
    if not (first and second):
        raise UserError(f"{DOCUMENT.name} must hold '{MARKS[0]}' and then '{MARKS[1]}', got neither or one")
    return f"{before}{first}\n{text}\n{second}{after}"


def written(cells: Cells) -> str:
    """What the runs say, in Markdown: how they were made, the figure, the tables."""
    commands = "\n".join(command("rlhf.train", "-m", *sweep) for sweep in SWEEPS)
    commands += "\n" + command("benchmarks.off_policy", "--draw")
    figure = f"![Gold win-rate over minibatches of a rollout batch, and over KL](../figures/{FIGURE.name})"
    return "\n".join(["", commands, "", about(cells), "", figure, "", tables(cells), ""])


def command(*words: str) -> str:
    """A command as a block of code, in lines of readable length."""
    parts = textwrap.wrap(
        f"python -m {shlex.join(words)}", 100, break_long_words=False, break_on_hyphens=False
    )
    return "    " + " \\\n        ".join(parts)


def about(cells: Cells) -> str:
    """How many runs there are, of when, on what machine, with which libraries."""
    runs = [run for found in cells.values() for run in found]
    expected = len(ALGORITHMS) * len(COLUMNS) * len(SEEDS)
    day = datetime.fromtimestamp(max(RunFolder(run.folder).state.stat().st_mtime for run in runs)).date()
    machines = ", ".join(sorted({run.hardware for run in runs}))
    versions = [
        f"{name} {', '.join(sorted({run.environment.get('packages', {}).get(name, '?') for run in runs}))}"
        for name in ("torch", "transformers")
    ]
    return f"{len(runs)} of {expected} runs, the last of {day}; {machines}; {', '.join(versions)}."


def tables(cells: Cells) -> str:
    """A table for each metric: a row an algorithm, a column an N; in brackets the least and the largest."""
    columns = [f"{n}, lag {lag}" if lag else str(n) for n, lag in COLUMNS]
    parts = []
    for heading, name, decimals in METRICS:
        rows = [
            [
                f"`{algorithm}`",
                *(cell(cells.get(Setting(algorithm, *at), []), name, decimals) for at in COLUMNS),
            ]
            for algorithm in ALGORITHMS
        ]
        lines = [[heading, *columns], ["---", *("--:" for _ in columns)], *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def cell(runs: Sequence[Run], name: str, decimals: int) -> str:
    """The mean over seeds, and their range where there are several; empty where there is no run."""
    found = [value for run in runs if (value := run.last(name)) is not None]
    if not found:
        return ""
    average, low, high = (f"{value:.{decimals}f}" for value in (mean(found), min(found), max(found)))
    return f"{average} ({low}, {high})" if len(found) > 1 else average


# -- the figure ------------------------------------------------------------------------------------------


def draw(cells: Cells, file: Path) -> None:
    """Win-rate over N with seeds as bands, and over KL with the ends of each line named by their N."""
    from matplotlib import rc_context

    from rlhf.report.figures import STYLE, Chart, legend, panels, trace

    with rc_context(STYLE):
        drawing, (over_n, over_kl) = panels(2, height=4.2)
        groups = []
        for place, algorithm in enumerate(ALGORITHMS):
            runs = {n: found for n in MINIBATCHES if (found := cells.get(Setting(algorithm, n)))}
            if not runs:
                continue
            group = Group(algorithm, tuple(run for found in runs.values() for run in found), place, place)
            groups.append(group)
            trace(over_n, group, [point([float(n)], found) for n, found in runs.items()], True, band=True)
            points = [point([run.last("eval/kl") or 0.0 for run in found], found) for found in runs.values()]
            trace(over_kl, group, points, True, band=False)
            for n, at in zip(runs, points, strict=True):
                if n in (MINIBATCHES[0], MINIBATCHES[-1]):
                    over_kl.annotate(str(n), (at.x, at.y), (5, 5), textcoords="offset points", fontsize=9)
        over_n.set_xscale("log", base=2)
        over_n.set_xticks(MINIBATCHES, list(map(str, MINIBATCHES)))
        over_n.set(xlabel="minibatches of a rollout batch (N)", ylabel="gold win-rate")
        over_kl.set(xlabel="KL to the reference (nats per response)", ylabel="gold win-rate")
        legend(drawing, groups)
        file.write_bytes(Chart(file.stem, "", "", drawing).png())


def point(x: Sequence[float], runs: Sequence[Run]) -> Point:
    """The last win-rate of the runs of a setting, over x."""
    won = [run.last("eval/win_rate") or 0.0 for run in runs]
    return Point(mean(x), mean(won), min(won), max(won), min(x), max(x))


if __name__ == "__main__":
    main()
