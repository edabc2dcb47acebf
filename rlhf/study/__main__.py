"""Command `python -m rlhf.study <command> <file> [arguments]`: studies that a file declares.

Exit codes: those of `rlhf.train`.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.core.console import console
from rlhf.core.errors import RunError, UserError
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
    from rlhf.study.page import state
    from rlhf.study.results import Results
    from rlhf.study.tables import for_terminal, tables

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


def plan(spec: Spec, options: Namespace) -> None:
    """Print the runs by grid and task, their states, and the price as far as it is known."""
    from rlhf.study.pricing import price
    from rlhf.study.study import Study

    found = Study(spec).plan(_only(spec, options))
    found.check()
    for line in [*found.lines(), *price(found).lines(1)]:
        console.print(line, markup=False, soft_wrap=True)


def price(spec: Spec, options: Namespace) -> None:
    """Print the price of the missing runs, after a pilot of each distinct cost."""
    from rlhf.study.study import Study

    for line in Study(spec).price().lines(options.workers):
        console.print(line, markup=False)


def run(spec: Spec, options: Namespace) -> None:
    """Carry out the missing runs."""
    from rlhf.study.study import Study

    Study(spec).run(options.workers, _only(spec, options), options.nice, options.failed)
    console.print(f"all runs are done; write the page: rlhf study page {spec.file}", markup=False)


def repeat(spec: Spec, options: Namespace) -> None:
    """Carry out one run again, and compare it with its row."""
    from rlhf.study.study import Study, differing

    row, new = Study(spec).repeat(dict(word.partition("=")[::2] for word in options.where))
    if found := differing(row, new):
        raise RunError(f"the run differs from its row in {', '.join(found)}: {row.metrics}, {new.metrics}")
    console.print(f"equal: {new.metric} {new.metrics.get(new.metric)}", markup=False)


def add(spec: Spec, options: Namespace) -> None:
    """Write a study of the methods of another file, and compare old and new rows by anchor runs."""
    from rlhf.study.adding import compare, write_study
    from rlhf.study.study import Study

    file = write_study(spec, options.methods)
    added = read_spec(file)
    Study(added).plan().check()
    for line in compare(Study(spec), added):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"study: {file}; next: rlhf study run {file}", markup=False, soft_wrap=True)


def _only(spec: Spec, options: Namespace) -> dict[str, list[str]]:
    """Return the values of `--only` and `--part` by name.

    Raises:
        UserError: a name is neither task, method, seed nor an axis.
    """
    found = {name: values.split(",") for name, _, values in (word.partition("=") for word in options.only)}
    known = ("task", "method", "seed", *spec.axes)
    for name in found:
        if name not in known:
            raise UserError(f"--only must name {', '.join(known)}, got {name}; write --only method=dpo")
    return found | ({"part": [options.part]} if options.part else {})


ONLY: Mapping[str, Mapping[str, Any]] = {
    "--only": {
        "nargs": "*",
        "default": [],
        "metavar": "NAME=VALUE,...",
        "help": "runs with these values of task, method, seed or an axis",
    },
    "--part": {"choices": ["tune", "table"], "help": "only the runs of the tuning, or of the tables"},
}
WORKERS: Mapping[str, Any] = {"type": int, "default": 1, "help": "runs in parallel"}
COMMANDS = {
    "plan": Command("Print what is done, stale and missing, and problems of the runs.", plan, ONLY),
    "price": Command(
        "Measure the cost of a run by short runs, and print the price.", price, {"--workers": WORKERS}
    ),
    "run": Command(
        "Carry out the missing runs; the same command resumes.",
        run,
        {
            "--workers": WORKERS,
            **ONLY,
            "--nice": {"type": int, "default": 0, "help": "niceness of the runs"},
            "--failed": {"action": "store_true", "help": "repeat runs that failed"},
        },
    ),
    "repeat": Command(
        "Carry out one run again, and compare it with its row.",
        repeat,
        {"where": {"nargs": "+", "metavar": "NAME=VALUE", "help": "task, method, axes and seed of the run"}},
    ),
    "add": Command(
        "Write a study of further methods beside the rows of this one.",
        add,
        {"methods": {"type": Path, "help": "a YAML file with methods, and perhaps claims and grids"}},
    ),
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
