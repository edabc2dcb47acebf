"""The command `python -m rlhf.bundle <run> --update <n> [--out <file>] [--no-weights] [--no-texts]`.

The command repeats one update of a run, and writes all that the update computes to one file, which
`rlhf.replay` computes again anywhere. Nothing must have been recorded before: the run is repeated in a copy
of its folder, from the last checkpoint before the update.

Exit codes: 0 success; 2 invalid input (such as an update that the run has not made), as `error: ...`;
otherwise as `rlhf.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.launch.command_line import with_flags
from rlhf.stages.evaluation import run_folder
from rlhf.terminal.console import say_loading, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    with with_flags("bundle", arguments) as options:
        folder, update = run_folder(options.run), options.update
        out = options.out or Path(f"{folder.path.absolute().name}-{update}.safetensors")
        say_loading()
        from rlhf.referee.bundle import bundle

        same = bundle(folder, update, out, not options.no_weights, not options.no_texts)
        known = {True: "with the metrics of the run", None: "which has no row in metrics.jsonl"}
        outcome = known.get(same, "with OTHER metrics than those in metrics.jsonl")
        weights = "" if options.no_weights else " and weights"
        show(f"{out}: update {update}, repeated {outcome}; {out.stat().st_size / 2**20:.1f} MiB")
        show(f"the file contains the prompts and responses of the update{weights}")


if __name__ == "__main__":
    main()
