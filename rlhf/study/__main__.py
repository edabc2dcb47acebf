"""Command `python -m rlhf.study <command> <file> [arguments]`: studies that a file declares.

Exit codes: 0 success; 2 invalid input, reported as `error: ...`.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.core.console import console
from rlhf.core.errors import UserError
from rlhf.core.output import prepare_output
from rlhf.launch.command_line import exit_codes
from rlhf.study.reading import read_spec
from rlhf.study.spec import Spec


class Command(NamedTuple):
    """A command: its description, its function, and its options as arguments of `add_argument`."""

    does: str
    run: Callable[[Spec, Namespace], None]
    options: Mapping[str, Mapping[str, Any]] = {}


def show(spec: Spec, options: Namespace) -> None:
    """Print the state and the tables so far; there are no verdicts."""
    from rlhf.study.formats import for_terminal
    from rlhf.study.page import state
    from rlhf.study.results import Results
    from rlhf.study.tables import tables

    results = Results.read(spec)
    for text in state(results):
        console.print(text.replace("**", ""), markup=False)
    for table in tables(results):
        console.print("", *for_terminal(table), sep="\n", markup=False, soft_wrap=True)


def page(spec: Spec, options: Namespace) -> None:
    """Write the page, tables and figures, and print their paths."""
    from rlhf.study.page import write_page
    from rlhf.study.results import Results

    if spec.figures and find_spec("matplotlib") is None:
        console.print("no figures: matplotlib is missing; run: pip install -e '.[report]'", markup=False)
    written = write_page(Results.read(spec), final=options.final, latex=options.latex)
    console.print(f"page: {spec.page} ({len(written) - 1} tables and figures: {spec.folder})", markup=False)


DOES = "Evaluate a study of tasks, methods, axes and seeds that a YAML file declares."
COMMANDS = {
    "show": Command("Print the state and the tables so far.", show),
    "page": Command(
        "Write the page, tables and figures from rows.jsonl.",
        page,
        {
            "--final": {
                "action": "store_true",
                "help": "refuse rows of changed code, and an incomplete study",
            },
            "--latex": {
                "action": "store_true",
                "help": "write tables for LaTeX (booktabs), and figures as PDF and SVG",
            },
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command with `arguments`, by default those of the command line."""
    prepare_output()
    parser = argparse.ArgumentParser(prog="python -m rlhf.study", description=DOES, allow_abbrev=False)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="<command>")
    for name, command in COMMANDS.items():
        own = parsers.add_parser(name, help=command.does, description=command.does, allow_abbrev=False)
        own.add_argument("file", type=Path, help="the study file")
        for option, keywords in command.options.items():
            own.add_argument(option, **keywords)
    options = parser.parse_args(arguments)
    with exit_codes():
        if find_spec("scipy") is None:
            raise UserError("rlhf study needs scipy, got no such package; run: pip install -e '.[report]'")
        COMMANDS[options.command].run(read_spec(options.file), options)


if __name__ == "__main__":
    main()
