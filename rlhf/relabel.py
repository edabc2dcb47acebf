"""Command `python -m rlhf.relabel output=<folder>`: relabel preference pairs with a judge.

    python -m rlhf.relabel output=<folder> [push_to=<owner>/<name>] [group=option ...] [key=value ...]

The judge (`scorer@gold`) scores both responses of every preference pair of the task. If the judge prefers
the rejected response, the two responses are swapped. The pairs are saved in <folder> with their scores; runs
with `task.preferences_path=<folder>` read these pairs. The same command resumes an interrupted command.

The exit codes are the exit codes of `rlhf.train`.
"""

from __future__ import annotations

from pathlib import Path

from rlhf.checks.check import check_push
from rlhf.core.errors import setting
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.stages import artefacts
from rlhf.stages.relabelling import pairs_of, relabel, table
from rlhf.terminal.console import console, say

COMMAND = Command(
    name="rlhf.relabel",
    usage="output=<folder> [task=...] [scorer@gold=...] [group=option ...] [key=value ...]",
    does=(
        "Scores both responses of every preference pair of the task by the judge\n"
        "(scorer@gold), swaps them if the judge prefers the rejected one, and saves the\n"
        "pairs with their scores. Use the result with task.preferences_path=<folder>."
    ),
    own={"output": "folder of the new data set", "push_to": artefacts.MEANS},
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], overrides: list[str]) -> None:
    """Relabel the pairs of a task, and print how often the judge agreed with the labels.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides of the config.

    Raises:
        UserError: an argument is invalid.
    """
    output = Path(COMMAND.required(own, "output", overrides)).expanduser()
    check_push(own.get("push_to"))
    cfg = pairs_of(overrides)
    relabel(cfg, output)
    if is_first_rank():
        console.print(table(output))
        say(f"pairs: {output} (use with {setting('task.preferences_path', output)})")
        if repository := own.get("push_to"):
            from datasets import load_from_disk

            say(f"pushed to {artefacts.push_data(load_from_disk(str(output)), output, repository)}")


if __name__ == "__main__":
    main()
