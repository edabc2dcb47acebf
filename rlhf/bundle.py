"""The command `python -m rlhf.bundle <run> --update <n> [--out <file>] [--no-weights] [--no-texts]`.

The command repeats one update of a run, and writes all that the update computes to one file, which
`rlhf.replay` computes again anywhere. Nothing must have been recorded before: the run is repeated in a copy
of its folder, from the last checkpoint before the update.

Exit codes: 0 success; 2 invalid input (such as an update that the run has not made), as `error: ...`;
otherwise as `rlhf.train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.root import set_environment
from rlhf.launch.command_line import exit_codes
from rlhf.stages.evaluation import run_folder
from rlhf.terminal.console import prepare_output, say_loading, show
from rlhf.words.catalogue import load_plugins

OUTCOMES = {
    True: "repeated with the metrics of the run",
    False: "repeated with OTHER metrics than those in metrics.jsonl",
    None: "repeated; metrics.jsonl has no row of it",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.bundle",
        description="Repeat one update of a run, and write all that it computes to one file.",
        allow_abbrev=False,
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--update", type=int, required=True, help="number of the update, from 1")
    parser.add_argument("--out", type=Path, help="the file (default: <run>-<update>.safetensors)")
    parser.add_argument(
        "--no-weights", action="store_true", help="leave out weights and optimizer: no replay"
    )
    parser.add_argument("--no-texts", action="store_true", help="leave out texts: rewards are not replayed")
    options = parser.parse_args(arguments)
    set_environment()
    with exit_codes():
        load_plugins()
        folder = run_folder(options.run)
        name = folder.path.absolute().name
        out = options.out or Path(f"{name}-{options.update}.safetensors")
        say_loading()
        from rlhf.referee.bundle import bundle

        same = bundle(folder, options.update, out, not options.no_weights, not options.no_texts)
        show(f"{out}: update {options.update}, {OUTCOMES[same]}; {out.stat().st_size / 2**20:.1f} MiB")
        show("the file contains prompts, responses" + (", weights" if not options.no_weights else ""))


if __name__ == "__main__":
    main()
