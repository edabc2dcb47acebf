"""The command `python -m rlhf.report <folders...> [--out <folder>] [--samples <n>] [--markdown]`.

The command reads the folders of finished and unfinished runs. For each kind of run and each data set, the
command prints the result in a sentence and a table of final results. The command writes `index.html`, a page
that loads no other file, and each figure of the page as PNG in the same folder.

Exit codes: 0 success; 2 invalid input (such as a folder without a run), reported as `error: ...`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

from rlhf.checks.check import refuse
from rlhf.config.schema import missing_package
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.core.launched import __version__
from rlhf.report import tables
from rlhf.report.figures import GLYPHS, SERIES, Chart, charts
from rlhf.report.runs import FoundRuns, duration, find_runs, number
from rlhf.report.tables import Group, Section, differences, remarks, result, results
from rlhf.terminal.console import console, prepare_output

_WIDTH = 80  # columns of the output if it is not a terminal


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
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
        _report(options.folders, options.out, options.samples, options.markdown)
    except UserError as error:
        refuse(error.problems)


def _report(folders: Sequence[str], out: Path, count: int, markdown: bool = False) -> None:
    """Print the table of the runs in `folders`, and write the page and its figures to `out`.

    Args:
        folders: run folders, folders that contain run folders, shell patterns.
        out: output folder.
        count: number of prompts per task for which the page shows completions.
        markdown: print the table in Markdown, and write no files.

    Raises:
        UserError: a folder contains no run, `count` is negative, `out` cannot be written, or matplotlib or
            Jinja2 is not installed.
    """
    needed = () if markdown else ("matplotlib", "jinja2")
    missing = (missing_package("rlhf.report", each, "report", "", "add --markdown") for each in needed)
    if problems := [*chain.from_iterable(missing)]:
        raise UserError(*problems)
    if count < 0:
        raise UserError(f"--samples must be >= 0 (a number of prompts), got {count}; set --samples 6")
    found = find_runs(folders, own=out)
    made = tables.sections(found.runs)
    notes = remarks(made, found)
    if found.left_out:
        notes.append(f"Skipped: {tables.some(found.left_out)}.")
    if markdown:
        for section in made:
            text = f"### {section.title}\n\n{result(section)}\n\n{tables.for_markdown(results(section))}\n"
            compared = "".join(f"- {each}\n" for each in differences(section))
            console.print(text + compared, markup=False, soft_wrap=True)
        for note in notes:
            console.print(f"- {note}", markup=False, soft_wrap=True)
        return
    width = console.width if console.is_terminal else _WIDTH

    def say(text: str, style: str | None = None) -> None:
        lines = wrap(text, width, break_long_words=False, break_on_hyphens=False)
        console.print(*lines, sep="\n", markup=False, style=style)

    for section in made:
        console.print(section.title, style="bold", markup=False)
        say(result(section))
        console.print(tables.for_terminal(results(section), width))
        for each in differences(section):
            say(str(each))
    date = f"made {datetime.now():%Y-%m-%d %H:%M} by rlhf {__version__}"
    html, images = page(made, found, count, date)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for chart in images:
            (out / f"{chart.name}.png").write_bytes(chart.image("png"))
        write_atomically(out / "index.html", html)
    except OSError as error:
        rule = "--out must be a folder that can be written (the page and its figures)"
        raise UserError(f"{rule}, got {out}: {error.strerror}; set --out <another folder>") from None
    for note in notes:
        say(note, style="yellow")
    console.print(f"page: {out / 'index.html'} ({len(images)} figures as PNG beside it)", markup=False)


# The HTML page: one file that contains styles, figures and script, and loads no other file.


_NAMES = 4  # largest number of algorithms in the title
_FOLDED = 8  # longer lists of runs and of commands are folded


def page(sections: Sequence[Section], found: FoundRuns, count: int, made: str) -> tuple[str, list[Chart]]:
    """Return the page of a report as HTML, and its figures.

    Args:
        sections: the sections of the report.
        found: the runs of the report, damaged folders and skipped folders.
        count: number of prompts of each section for which the page shows completions.
        made: date of the report and version of rlhf.
    """
    runs, notes = found.runs, remarks(sections, found)
    parts: list[dict[str, Any]] = []
    shown_as_tables = (results, differences, tables.settings, tables.not_drawn)
    for section in sections:
        end = f"_{section.name}" if len(sections) > 1 else ""  # of the ids of the section
        drawn, undrawn = charts(section)
        shown, unreadable = tables.samples(section, count)
        notes += unreadable
        part = {
            "section": section,
            "end": end,
            "charts": [replace(chart, name=f"{chart.name}{end}") for chart in drawn],
            "undrawn": undrawn,
            "samples": shown,
            **{each.__name__: each(section) for each in shown_as_tables},
        }
        parts.append(part)
    from jinja2 import Environment, PackageLoader, StrictUndefined

    names = dict.fromkeys(run.config["algo.name"] for run in runs)
    tasks = {run.config["task.name"] for run in runs}
    few = len(tasks) == 1 and len(names) <= _NAMES
    outcomes = Counter(run.outcome for run in runs)  # in the order of their first runs
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    loader = PackageLoader("rlhf.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    functions = (_colour, _glyph, _summary, _judgement, result, duration, number)
    environment.globals |= {each.__name__.strip("_"): each for each in functions}
    html = environment.get_template("page.html").render(
        title=f"{', '.join(names)} on {', '.join(tasks)}" if few else f"Report of {len(runs)} runs",
        subtitle=f"{len(runs)} run{'s' * (len(runs) != 1)} ({counts})",
        made=made,
        notes=notes,
        parts=parts,
        empty=[run for run in runs if not run.rows],
        broken=found.broken,
        left_out=found.left_out,
        count=len(runs) + len(found.broken),
        folded=_FOLDED,
        commands=Counter((run.command, run.commit) for run in runs),
    )
    return html, [chart for part in parts for chart in part["charts"]]


def _colour(group: Group) -> str:
    """Return the colour of a group as a CSS value; grey for a group that is not drawn."""
    return "var(--rule)" if group.place is None else f"var(--series-{group.place % len(SERIES)})"


def _glyph(group: Group) -> str:
    """Return the marker of a group as a character."""
    return GLYPHS[0 if group.place is None else group.place % len(GLYPHS)]


def _summary(prompt: str) -> str:
    """Return the TITLE line of a prompt, else its first line, truncated to 160 characters."""
    lines = [line for line in prompt.splitlines() if line.strip()] or ["(empty)"]
    return next((line for line in lines if line.startswith("TITLE:")), lines[0])[:160]


def _judgement(row: dict[str, Any], reference: float | None) -> list[str]:
    """Return the scores of a response, with "won", "tied" or "lost" against the reference response.

    Args:
        row: row of completions.jsonl, with `gold_score` and `score` where they were computed.
        reference: judge score of the reference response; None if there is no comparison.
    """
    gold, score = row.get("gold_score"), row.get("score")
    parts = [] if gold is None else [f"judge {number(gold, 2)}"]
    if gold is not None and reference is not None:
        parts.append("won" if gold > reference else "lost" if gold < reference else "tied")
    return [*parts, *([] if score is None else [f"reward {number(score, 2)}"])]


if __name__ == "__main__":
    main()
