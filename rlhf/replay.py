"""The command `python -m rlhf.replay <bundle> [--only rewards|update] [--prompt <i>] [--trust] [--json]`.

The command computes the update of a bundle (`rlhf.bundle`) again: rewards, advantages, the optimizer steps
and the new weights. It needs no data set, no generator, no reference and no judge, and compares every number
with the file, in the order of the computation.

Exit codes: 0 same bits, or on another machine same within rounding; 1 a quantity differs; 2 invalid input, as
`error: ...`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlhf.launch.command_line import with_flags
from rlhf.terminal.console import say_loading, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing that a bundle names is fetched
    with with_flags("replay", arguments) as options:
        if not options.json:
            say_loading()
        from rlhf.referee.replay import differences, load, replay, report

        given = load(options.bundle)
        row = None if options.prompt is None else options.prompt - 1
        again = replay(given, options.only, row, options.trust)
        if not options.json:
            rewards = "" if again.header["rewards"] else ", rewards"
            show(f"taken from the file: prompts, responses, log-probs of sampler and reference{rewards}")
        raise SystemExit(report(differences(given, again, row, whole=False), options.json))


if __name__ == "__main__":
    main()
