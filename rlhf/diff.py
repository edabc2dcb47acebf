"""The command `python -m rlhf.diff <a> <b> [--json]`: the first number in which two updates differ.

`a` and `b` are two bundles (`rlhf.bundle`), or two run folders. Of run folders, the first update with other
metrics is repeated in both, without times, throughput and memory. Quantities are compared in the order of the
computation, so the first one is the cause of the others.

Exit codes: 0 same bits, or of two machines same within rounding; 1 a quantity differs; 2 invalid input, as
`error: ...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf.launch.command_line import with_flags
from rlhf.stages.evaluation import run_folder
from rlhf.terminal.console import say_loading, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    with with_flags("diff", arguments) as options, TemporaryDirectory() as scratch:
        if not options.json:
            say_loading()
        from rlhf.referee.replay import bundles_of, differences, load, report

        files = [options.a, options.b]
        if any(path.is_dir() for path in files):
            first, files = bundles_of([run_folder(str(path)) for path in files], Path(scratch))
            if first is None:
                raise SystemExit(report([], options.json))
            if not options.json:
                show(f"the first update with other metrics: {first}")
        a, b = map(load, files)
        raise SystemExit(report(differences(a, b), options.json))


if __name__ == "__main__":
    main()
