"""Command `python -m rlhf.study <command> <file> [arguments]`: studies that a file declares.

Exit codes: those of `rlhf.train`. The first line of the function of a command is its description.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.schema import data_file
from rlhf.core.errors import RunError, UserError
from rlhf.core.launched import PORTABLE
from rlhf.launch.command_line import exit_codes
from rlhf.terminal import console

if TYPE_CHECKING:
    from rlhf.study.study import Study


def plan(study: Study, options: argparse.Namespace) -> None:
    """Print what is done, stale and missing, and problems of the runs."""
    from rlhf.study.work import price_of

    found = study.plan(_only(options))
    found.check()
    for line in [*found.lines(), *price_of(found).lines(1), f"results: {study.spec.folder}"]:
        console.show(line)


def price(study: Study, options: argparse.Namespace) -> None:
    """Measure the cost of a run by short runs, and print the price."""
    for line in study.price().lines(options.workers):
        console.show(line)


def run(study: Study, options: argparse.Namespace) -> None:
    """Carry out the missing runs; the same command resumes."""
    study.run(options.workers, _only(options), options.nice, options.failed, options.slurm)
    console.show(f"all runs are done; write the page: rlhf study page {study.spec.file}")


def repeat(study: Study, options: argparse.Namespace) -> None:
    """Carry out one run again, and compare it with its row."""
    from rlhf.study.study import difference

    row, new = study.repeat(dict(word.partition("=")[::2] for word in options.where))
    if found := difference(row, new):
        raise RunError(found)
    console.show(f"equal: {new.metric} {new.metrics.get(new.metric)}")


def add(study: Study, options: argparse.Namespace) -> None:
    """Write a study of further methods beside the rows of this one."""
    from rlhf.study.study import compare, write_study

    added = type(study)(file := write_study(study.spec, options.methods))
    for line in compare(study, added.spec):
        console.show(line)
    console.show(f"study: {file}; next: rlhf study run {file}")


def show(study: Study, options: argparse.Namespace) -> None:
    """Print the state and the tables so far."""
    from rlhf.study.page import for_terminal, state, tables
    from rlhf.study.rows import Results

    results = Results.read(study.spec)
    for text in state(results):
        console.show(text.replace("**", ""))
    for table in tables(results):
        console.show("\n".join(["", *for_terminal(table)]))


def page(study: Study, options: argparse.Namespace) -> None:
    """Write the page, tables and figures from rows.jsonl."""
    from rlhf.study.page import write_page
    from rlhf.study.rows import Results

    spec = study.spec
    if spec.figures and find_spec("matplotlib") is None:
        console.show("no figures: matplotlib is missing; run: pip install -e '.[report]'")
    try:
        written = write_page(Results.read(spec), final=options.final, latex=options.latex)
    except OSError as error:
        got = f"{error.filename or spec.folder} ({error.strerror})"
        raise UserError(f"page must write files in {spec.folder}, got {got}; make it writable") from None
    console.show(f"page: {spec.page} ({len(written) - 1} tables and figures: {spec.folder})")


def _count(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text}; write 1")
    return int(text)


_OPTIONS = data_file("rlhf.study", "options.yaml")
_TYPES = {"path": Path, "count": _count, "int": int}
_COMMANDS = {
    plan: ("--only", "--part"),
    price: ("--workers",),
    run: ("--workers", "--slurm", "--only", "--part", "--nice", "--failed"),
    repeat: ("where",),
    add: ("methods",),
    show: (),
    page: ("--final", "--latex"),
}
_DOES = "Evaluate a study of tasks, methods, axes and seeds that a YAML file declares."


def _only(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the values of `--only` and `--part` by name."""
    found = {name: values.split(",") for name, _, values in (word.partition("=") for word in options.only)}
    return found | ({"part": [options.part]} if options.part else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command with `arguments`, by default those of the command line."""
    console.prepare_output()
    parser = argparse.ArgumentParser(prog="python -m rlhf.study", description=_DOES, allow_abbrev=False)
    parsers = parser.add_subparsers(required=True, metavar="<command>")
    for command, names in _COMMANDS.items():
        does = command.__doc__
        own = parsers.add_parser(command.__name__, help=does, description=does, allow_abbrev=False)
        own.set_defaults(command=command)
        own.add_argument("file", type=Path, help="the study file")
        for name in names:
            types = {"type": _TYPES[_OPTIONS[name]["type"]]} if "type" in _OPTIONS[name] else {}
            own.add_argument(name, **{**_OPTIONS[name], **types})
    options = parser.parse_args(arguments)
    with exit_codes():
        if find_spec("scipy") is None:
            raise UserError("rlhf study needs scipy, got no such package; run: pip install -e '.[report]'")
        from rlhf.study.study import Study

        study = Study(options.file)
        if "backend.portable=true" in study.spec.overrides:  # before the user's code computes with torch
            os.environ.update(PORTABLE)
        options.command(study, options)


if __name__ == "__main__":
    main()
