"""Command `python -m rlhf.evaluate`: evaluate the models of a run, and any other models.

    python -m rlhf.evaluate run=<folder> [models=<a>,<b>] [split=test] [only=<name>,...] [key=value ...]
    python -m rlhf.evaluate models=<a>,<b> [split=test] [group=option ...] [key=value ...]

Each model is evaluated on held-out examples, as during training. With `run=`, the config is the config of the
run, changed by overrides such as `generator=vllm`, `scorer@gold=...` or `eval.prompts=1000`, and the results
are in the run folder. Without `run=`, the config consists of the overrides (`task=`, `scorer=`, ...), and the
results are in `<output_dir>/evaluations/`. Models that were already evaluated with the same settings are
skipped. Results are appended to evaluations.jsonl, completions are written to evaluations/.

The exit codes are the exit codes of `rlhf.train`.
"""

from __future__ import annotations

from pathlib import Path

from rlhf.core.errors import UserError
from rlhf.core.files import component
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.runs.folder import RunFolder
from rlhf.stages.evaluation import alone, changed, evaluate, run_folder, table
from rlhf.terminal.console import console, say
from rlhf.words.compose import digest
from rlhf.words.mistakes import texts

COMMAND = Command(
    name="rlhf.evaluate",
    usage="run=<folder> [models=<a>,<b>] [split=test] [only=<name>,...] [group=option ...] [key=value ...]",
    does=(
        "Evaluates every checkpoint of a run and its final model on held-out examples,\n"
        "and the models that models= names, in one table. Appends a row for each to\n"
        "<folder>/evaluations.jsonl. Settings are those of the run; overrides change\n"
        "them, such as eval.prompts=1000, generator=vllm,\n"
        "scorer@gold=reward_model gold.path=<model>.\n"
        "Without run=, the overrides are the settings: models=<a>,<b> task=... scorer=..."
    ),
    lists=("models", "only"),
    own={
        "run": "run folder",
        "models": "further models, folders or hub names; quotes around a name with a comma",
        "split": "held-out split: validation (default) or test",
        "only": "models of the run to evaluate, such as model or checkpoint-10,model (default: all)",
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(_command)


def _command(own: dict[str, str], overrides: list[str]) -> None:
    """Evaluate models, and print the results.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides that change the config of the run, or that are the config.

    Raises:
        UserError: the run does not exist, or an argument is invalid.
    """
    split = own.get("split", "validation")
    models = texts(own.get("models", ""))
    if "run" in own or not models:
        folder = run_folder(COMMAND.required(own, "run", overrides))
        cfg = changed(folder, overrides)
    else:
        if "only" in own:
            raise UserError(f"only= must be used with run= (it names models of a run), got {own['only']}")
        cfg = alone(models, overrides)
        name = component(f"{cfg.task.name}-{digest(cfg)}")
        folder = RunFolder(Path(cfg.output_dir) / "evaluations" / name)
    rows = evaluate(cfg, folder, split, texts(own.get("only", "")), models)
    if is_first_rank():
        console.print(table(rows, console.width), markup=False, soft_wrap=True)
        say(f"rows: {folder.evaluations}")


if __name__ == "__main__":
    main()
