"""The command: `python -m rlhf.report <folders...> [--out <folder>] [--samples <n>] [--markdown]`.

Reads run folders, finished or not, and writes `index.html`, one page that needs nothing else, with each of
its figures as a PNG beside it; a table of final results goes to the terminal. Exit codes: 0 done; 2 a folder
that holds no run, or another mistake, as `error: ...`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import __version__
from rlhf.checks.check import refuse
from rlhf.core.console import console
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.report.groups import group_runs
from rlhf.report.runs import find_runs
from rlhf.report.samples import samples
from rlhf.report.table import for_markdown, for_terminal, results

if TYPE_CHECKING:
    from rlhf.report.groups import Group


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.report",
        description="One page of figures, and a table, of the runs in some folders.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", help="run folders, folders that contain some, shell patterns")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/report"), help="where to write (%(default)s)"
    )
    parser.add_argument("--samples", type=int, default=6, help="prompts to show completions of (%(default)s)")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table as Markdown, and write nothing"
    )
    asked = parser.parse_args(words)
    try:
        report(asked.folders, asked.out, asked.samples, asked.markdown)
    except UserError as error:
        refuse(error.problems)


def report(folders: Sequence[str], out: Path, count: int, markdown: bool = False) -> None:
    """Print the table of the runs in `folders`; write page and pictures to `out`, unless it is for Markdown.

    Raises:
        UserError: a folder holds no run, or matplotlib is missing.
    """
    if not markdown and find_spec("matplotlib") is None:
        raise UserError(
            "rlhf.report needs matplotlib (it draws the figures), which is not installed; run: "
            "pip install 'rlhf[report]', or add --markdown for the table alone"
        )
    if count < 0:
        raise UserError(f"--samples must be >= 0 (prompts to show answers to), got {count}; set --samples 6")
    found = find_runs(folders, own=out)
    groups = group_runs(found.runs)
    table = results(groups)
    if markdown:
        print(for_markdown(table))
        return
    console.print(for_terminal(table))
    from rlhf.report.figures import charts
    from rlhf.report.page import page

    drawn, missing = charts(groups)
    notes = [*cautions(groups), *(f"No figure of {text}." for text in missing)]
    made = f"made {datetime.now():%Y-%m-%d %H:%M} by rlhf {__version__}"
    out.mkdir(parents=True, exist_ok=True)
    for chart in drawn:
        (out / f"{chart.name}.png").write_bytes(chart.png())
    write_atomically(
        out / "index.html", page(groups, table, drawn, samples(groups, count), notes, found.left_out, made)
    )
    for note in [*notes, *(f"Left out: {text}." for text in found.left_out)]:
        console.print(note, markup=False, style="yellow")
    console.print(f"page: {out / 'index.html'}, with its {len(drawn)} figures as PNG beside it", markup=False)


def cautions(groups: Sequence[Group]) -> list[str]:
    """What is to be known before figures are compared."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if open_runs := [run for group in groups for run in group.unfinished]:
        notes.append(
            f"{len(open_runs)} of {len(runs)} runs not finished: dashed in the figures, and no part of means."
        )
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notes.append(
                f"{group.label}: seed {', '.join(map(str, twice))} is there more than once (the same "
                "settings in several folders), and counts as often."
            )
    if len({run.commit for run in runs}) > 1:
        notes.append("The runs were made by different commits of the code (see Runs).")
    if len({run.hardware for run in runs}) > 1:
        notes.append("The runs were made on different hardware: their times do not compare.")
    return notes


if __name__ == "__main__":
    main()
