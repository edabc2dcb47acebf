"""Command `python -m rlhf.evaluate run=<folder>`: evaluate the checkpoints and the final model of a run.

    python -m rlhf.evaluate run=<folder> [split=test] [only=<name>,...] [group=option ...] [key=value ...]

Each model is evaluated on held-out examples, as during training. The config is the config of the run, changed
by overrides such as `generator=vllm`, `scorer@gold=...` or `eval.prompts=1000`. Models that were already
evaluated with the same settings are skipped. Results are appended to evaluations.jsonl in the run folder,
completions are written to evaluations/.

The exit codes are the exit codes of `rlhf.train`.
"""

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
        "for each to <folder>/evaluations.jsonl. Settings are those of the run; overrides change them,\n"
        "such as eval.prompts=1000, generator=vllm, scorer@gold=reward_model gold.path=<model>."
    ),
    own={
        "run": "run folder",
        "split": "held-out split: validation (default) or test",
        "only": "models to evaluate, such as model or checkpoint-10,model (default: all)",
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], overrides: list[str]) -> None:
    """Evaluate the models of a run, and print the results.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides that change the config of the run.

    Raises:
        UserError: the run does not exist, or an argument is invalid.
    """
    folder = run_folder(COMMAND.required(own, "run", overrides))
    split = own.get("split", "validation")
    check_split(split)
    cfg = changed(folder, overrides)
    rows = evaluate(cfg, folder, split, tuple(own.get("only", "").split(",")))
    if is_first_rank():
        console.print(table(rows))
        say(f"rows: {folder.evaluations}")


if __name__ == "__main__":
    main()
