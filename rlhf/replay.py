"""The command `python -m rlhf.replay <bundle> [--only rewards|update] [--prompt <i>] [--trust] [--json]`.

The command computes the update of a bundle (`rlhf.bundle`) again: rewards, advantages, the optimizer steps
and the new weights. It needs no data set, no generator, no reference and no judge, and compares every number
with the file, in the order of the computation.

Exit codes: 0 same bits, or on another machine same within rounding; 1 a quantity differs; 2 invalid input, as
`error: ...`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.root import set_environment
from rlhf.launch.command_line import exit_codes
from rlhf.terminal.console import prepare_output, say_loading
from rlhf.words.catalogue import load_plugins


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.replay",
        description="Compute the update of a bundle again, and name the first number that differs.",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, help="a file of rlhf.bundle")
    parser.add_argument("--only", choices=("rewards", "update"), default="", help="compute one of them")
    parser.add_argument("--prompt", type=int, help="compare one prompt of the batch, from 1")
    parser.add_argument("--trust", action="store_true", help="let the file name code, files and addresses")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    options = parser.parse_args(arguments)
    set_environment()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing that a bundle names is fetched
    with exit_codes():
        load_plugins()
        if not options.json:
            say_loading()
        from rlhf.referee.diff import differences, report
        from rlhf.referee.replay import load, replay

        given = load(options.bundle)
        prompt = None if options.prompt is None else options.prompt - 1
        again = replay(given, options.only, prompt, options.trust)
        found = differences(given, again, prompt, whole=False)
        raise SystemExit(report(found, given.header["machine"] != again.header.get("machine"), options.json))


if __name__ == "__main__":
    main()
