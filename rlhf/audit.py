"""Command `python -m rlhf.audit <file> [flags]`: recompute a dumped optimizer step of any framework.

Exit codes:
    0: no term is wrong.
    1: a term is wrong.
    2: the file or an argument is invalid.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rlhf.core.errors import UserError, report
from rlhf.terminal.console import console, prepare_output, print_error, show

_MARKS = {"ok": "agrees", "wrong": "WRONG", "unchecked": "not checked"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
    try:
        code = _audit(_parser().parse_args(arguments))
    except UserError as error:
        print_error(report(error.problems))
        code = 2
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.audit",
        description="Recompute an optimizer step that a training framework dumped, term by term, and name "
        "the first term that differs from the settings of the framework. Without settings in the file, name "
        "the known variant that the numbers are. Exit code 1: a term is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="batch file (schema 1), or bundle")
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, metavar="N", default=1, help="optimizer step of a bundle, from 1")
    add("--sample", type=int, metavar="N", help="print the tokens of a response of the step, from 1")
    add("--html", type=Path, metavar="FILE", help="write the table of --sample to a page")
    parser.add_argument("--ignore-claims", action="store_true", help="identify the variant by the numbers")
    add("--mistakes", type=Path, metavar="YAML", help="further rows, as in rlhf/referee/mistakes.yaml")
    add("--model", type=Path, metavar="FOLDER", help="weights before the step, to check log-probs and norm")
    parser.add_argument("--json", action="store_true", help="print a list of term, state and text")
    return parser


def _audit(options: argparse.Namespace) -> int:
    """Print a line per term and the first wrong term; return the exit code."""
    from rlhf.referee.audit import audit
    from rlhf.referee.file import read
    from rlhf.referee.mistakes import own_rows

    own = own_rows(options.mistakes) if "mistakes" in options else {}
    file = read(options.file)
    if file.header.get("kind") == "bundle":
        from rlhf.referee.step import as_page, batch_file, token_table

        if "sample" in options:
            table = token_table(options.file, options.step, options.sample)
            console.print(table)
            if "html" in options:
                options.html.write_text(as_page(table), encoding="utf-8")
            return 0
        file = batch_file(options.file, options.step)
    if options.ignore_claims:
        file = replace(file, header={**file.header, "claims": {}})
    findings = audit(file, own)
    if "model" in options:
        from rlhf.referee.model import weights

        findings += weights(file, options.model)
    wrong = [each for each in findings if each.state == "wrong"]
    if options.json:
        print(json.dumps([asdict(each) for each in findings]))
        return int(bool(wrong))
    head = f"{file.header.get('framework', 'unknown')} {file.header.get('version', '')}".strip()
    size = f"{len(file.mask)} responses, {int(file.mask.sum())} tokens"
    said = "" if file.header.get("claims") else "; no settings in the file: the variant is identified"
    show(f"{file.path.name}: {head}, step {file.header.get('step', '?')}, {size}{said}")
    for each in findings:
        show(f"  {each.term:19}{_MARKS[each.state]:12}{each.text}")
    show(f"first wrong term: {wrong[0].term}: {wrong[0].text}" if wrong else "agrees")
    return int(bool(wrong))


if __name__ == "__main__":
    main()
