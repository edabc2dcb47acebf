"""The command `python -m rlhf.report <folders...> [--out <folder>] [--samples <n>] [--markdown]`.

The command reads the folders of finished and unfinished runs. For each kind of run and each data set, the
command prints the result in a sentence and a table of final results. The command writes `index.html`, a page
that loads no other file, and each figure of the page as PNG in the same folder.

Exit codes: 0 success; 2 invalid input (such as a folder without a run), reported as `error: ...`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap

from rlhf.checks.check import refuse
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.core.launched import __version__
from rlhf.report.groups import sections
from rlhf.report.runs import find_runs
from rlhf.report.tables import differences, for_markdown, for_terminal, remarks, result, results, some
from rlhf.terminal.console import console, prepare_output

_WIDTH = 80  # columns of the output if it is not a terminal
_NEEDS = ("matplotlib", "jinja2")  # packages of the extra `_report`


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
    missing = [] if markdown else [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise UserError(
            f"rlhf.report needs {' and '.join(missing)} (for the figures and the page), got no such package; "
            "run: pip install -e '.[report]', or add --markdown to print only the table"
        )
    if count < 0:
        raise UserError(f"--samples must be >= 0 (a number of prompts), got {count}; set --samples 6")
    found = find_runs(folders, own=out)
    made = sections(found.runs)
    notes = remarks(made, found)
    if found.left_out:
        notes.append(f"Skipped: {some(found.left_out)}.")
    if markdown:
        for section in made:
            text = f"### {section.title}\n\n{result(section)}\n\n{for_markdown(results(section))}\n"
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
        console.print(for_terminal(results(section), width))
        for each in differences(section):
            say(str(each))
    from rlhf.report import page

    date = f"made {datetime.now():%Y-%m-%d %H:%M} by rlhf {__version__}"
    html, charts = page.write(made, found, count, date)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            (out / f"{chart.name}.png").write_bytes(chart.image("png"))
        write_atomically(out / "index.html", html)
    except OSError as error:
        raise UserError(
            f"--out must be a folder that can be written (the page and its figures), got {out}: "
            f"{error.strerror}; set --out <another folder>"
        ) from None
    for note in notes:
        say(note, style="yellow")
    console.print(f"page: {out / 'index.html'} ({len(charts)} figures as PNG beside it)", markup=False)


if __name__ == "__main__":
    main()
