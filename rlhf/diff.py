"""The command `python -m rlhf.diff <a> <b> [--json]`: the first number in which two updates differ.

`a` and `b` are two bundles (`rlhf.bundle`), or two run folders. Of run folders, the first update with other
metrics is repeated in both, without times, throughput and memory. Quantities are compared in the order of the
computation, so the first one is the cause of the others.

Exit codes: 0 same bits, or of two machines same within rounding; 1 a quantity differs; 2 invalid input, as
`error: ...`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf.config.root import set_environment
from rlhf.launch.command_line import exit_codes
from rlhf.stages.evaluation import run_folder
from rlhf.terminal.console import prepare_output, say_loading, show
from rlhf.words.catalogue import load_plugins


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.diff",
        description="Name the first number in which two updates differ, in the order of the computation.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, help="a bundle, or a run folder")
    parser.add_argument("b", type=Path, help="another one of the same kind")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    options = parser.parse_args(arguments)
    set_environment()
    with exit_codes(), TemporaryDirectory() as scratch:
        load_plugins()
        if not options.json:
            say_loading()
        from rlhf.referee.diff import bundles_of, differences, report
        from rlhf.referee.replay import load

        files = [options.a, options.b]
        if any(path.is_dir() for path in files):
            found = bundles_of([run_folder(str(path)) for path in files], Path(scratch))
            if found is None:
                raise SystemExit(report([], False, options.json))
            first, files = found
            if not options.json:
                show(f"the first update with other metrics: {first}")
        a, b = map(load, files)
        raise SystemExit(
            report(differences(a, b), a.header.get("machine") != b.header.get("machine"), options.json)
        )


if __name__ == "__main__":
    main()
