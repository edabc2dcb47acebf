from __future__ import annotations

from rlhf.core.console import console, say
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.stages.evaluation import changed, check_split, evaluate, run_folder, table

COMMAND = Command(
    name="rlhf.evaluate",
    usage="run=<folder> [split=test] [only=<name>,...] [group=option ...] [key=value ...]",
    does=(
        "Evaluates every checkpoint of a run and its final model on held-out examples, and appends a row\n"
        "for each to <folder>/evaluations.jsonl. Settings are those of the run; words change them, such as\n"
        "eval.prompts=1000, generator=vllm, scorer@gold=reward_model gold.path=<model>."
    ),
    own={
        "run": "folder of the run",
        "split": "held-out split: validation (default) or test",
        "only": "names of what to evaluate, such as model or checkpoint-10,model (default: all)",
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], words: list[str]) -> None:
    """Evaluate what the words say, and show it.

    Raises:
        UserError: there is no such run, or a word is wrong.
    """
    folder = run_folder(COMMAND.needed(own, "run", words))
    split = own.get("split", "validation")
    check_split(split)
    cfg = changed(folder, words)
    rows = evaluate(cfg, folder, split, tuple(own.get("only", "").split(",")))
    if is_first_rank():
        console.print(table(rows))
        say(f"rows: {folder.evaluations}")


if __name__ == "__main__":
    main()
