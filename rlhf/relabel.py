from __future__ import annotations

from pathlib import Path

from rlhf.core.console import console, say
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.stages import hub
from rlhf.stages.relabelling import pairs_of, relabel, table

COMMAND = Command(
    name="rlhf.relabel",
    usage="output=<folder> [task=...] [scorer@gold=...] [group=option ...] [key=value ...]",
    does=(
        "Scores both responses of every preference pair of the task by the gold scorer, swaps them where it\n"
        "prefers the rejected one, and saves the pairs with their scores. Read them again by\n"
        "task.preferences_path=<folder>."
    ),
    own={"output": "folder of the data set that is made", "push_to": hub.MEANS},
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], words: list[str]) -> None:
    """Relabel what the words say, and show how often the judge agreed.

    Raises:
        UserError: a word is wrong.
    """
    output = Path(COMMAND.needed(own, "output", words)).expanduser()
    hub.check(own.get("push_to"))
    cfg = pairs_of(words)
    relabel(cfg, output)
    if is_first_rank():
        console.print(table(output))
        say(f"pairs: {output} (task.preferences_path={output})")
        if repository := own.get("push_to"):
            from datasets import load_from_disk

            say(f"pushed to {hub.push_data(load_from_disk(str(output)), output, repository)}")


if __name__ == "__main__":
    main()
