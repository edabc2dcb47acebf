"""The command `python -m rlhf.report <folders...> [--out <folder>] [--samples <n>] [--markdown]`.

The command reads the folders of finished and unfinished runs, and prints a table of final results. The
command writes `index.html`, a page that loads no other file, and each figure of the page as PNG in the same
folder.

Exit codes: 0 success; 2 invalid input (such as a folder without a run), reported as `error: ...`.
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

NEEDS = ("matplotlib", "jinja2")  # packages of the extra `report`


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.report",
        description="Write a page of figures, and print a table of final results, from run folders.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", help="run folders, folders with run folders, shell patterns")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/report"), help="output folder (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=6, help="number of prompts with completions (default: %(default)s)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown, write no files")
    options = parser.parse_args(arguments)
    try:
        report(options.folders, options.out, options.samples, options.markdown)
    except UserError as error:
        refuse(error.problems)


def report(folders: Sequence[str], out: Path, count: int, markdown: bool = False) -> None:
    """Print the table of the runs in `folders`, and write the page and its figures to `out`.

    Args:
        folders: run folders, folders that contain run folders, shell patterns.
        out: output folder.
        count: number of prompts per task for which the page shows completions.
        markdown: print the table in Markdown, and write no files.

    Raises:
        UserError: a folder contains no run, `count` is negative, or matplotlib or Jinja2 is not installed.
    """
    missing = [] if markdown else [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UserError(
            f"rlhf.report needs {' and '.join(missing)} (for the figures and the page), got no such package; "
            "run: pip install -e '.[report]', or add --markdown to print only the table"
        )
    if count < 0:
        raise UserError(f"--samples must be >= 0 (a number of prompts), got {count}; set --samples 6")
    found = find_runs(folders, own=out)
    groups = group_runs(found.runs)
    table = results(groups)
    if markdown:
        print(for_markdown(table))
        return
    console.print(for_terminal(table))
    from rlhf.report.figures import charts
    from rlhf.report.page import page

    drawn, without_data = charts(groups)
    notes = [*cautions(groups), *(f"No figure of {text}." for text in without_data)]
    made = f"made {datetime.now():%Y-%m-%d %H:%M} by rlhf {__version__}"
    out.mkdir(parents=True, exist_ok=True)
    for chart in drawn:
        (out / f"{chart.name}.png").write_bytes(chart.png())
    write_atomically(
        out / "index.html", page(groups, table, drawn, samples(groups, count), notes, found.left_out, made)
    )
    for note in [*notes, *(f"Skipped: {text}." for text in found.left_out)]:
        console.print(note, markup=False, style="yellow")
    console.print(f"page: {out / 'index.html'} ({len(drawn)} figures as PNG beside it)", markup=False)


def cautions(groups: Sequence[Group]) -> list[str]:
    """Return remarks that a reader needs before comparing the groups."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if unfinished := [run for group in groups for run in group.unfinished]:
        notes.append(
            f"{len(unfinished)} of {len(runs)} runs are unfinished: they are dashed in the figures, and not "
            "part of the means."
        )
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notes.append(
                f"{group.label}: more than one folder has the same settings and seed "
                f"{', '.join(map(str, repeated))}; each folder counts as a run."
            )
    if len({run.commit for run in runs}) > 1:
        notes.append("The runs were made with different commits of the code (see Runs).")
    if len({run.hardware for run in runs}) > 1:
        notes.append("The runs were made on different hardware: their times are not comparable.")
    return notes


if __name__ == "__main__":
    main()
