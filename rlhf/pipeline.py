"""Command `python -m rlhf.pipeline`: run all stages of RLHF, from an SFT model to an evaluation.

    python -m rlhf.pipeline [split=test] [push_to=<owner>/<name>] [group=option ...] [key=value ...]

    SFT model -> preference pairs -> reward model -> RLHF -> evaluation

Overrides apply to the RLHF run; `stages.sft=[...]` and `stages.reward=[...]` are overrides of the SFT and
reward-model stages. Finished stages are skipped, and the same command resumes an interrupted stage. All
stages are checked before the first stage starts. `rlhf.stages.pipeline` describes the stages.

The exit codes are the exit codes of `rlhf.train`.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from rlhf.checks.check import check_push
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import claimed
from rlhf.runs.resuming import folder_of
from rlhf.stages import artefacts
from rlhf.stages.artefacts import trained
from rlhf.stages.evaluation import check_split
from rlhf.stages.pipeline import carry_out, config_of, embedded_chain, evaluation, stored_chain, train
from rlhf.terminal.console import console

COMMAND = Command(
    name="rlhf.pipeline",
    usage="[split=test] [push_to=<owner>/<name>] [group=option ...] [key=value ...]",
    does=(
        "Trains the SFT model, makes preference pairs, trains the reward model and the\n"
        "policy, and evaluates the policy. Finished stages are skipped; the same command\n"
        "resumes an interrupted stage. Overrides are those of the RLHF run;\n"
        "stages.sft=[...] and stages.reward=[...] are overrides of the stages before it."
    ),
    own={
        "split": "held-out split of the final evaluation: validation (default) or test",
        "push_to": artefacts.MEANS,
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(_command)


def _command(own: dict[str, str], overrides: list[str]) -> None:
    """Run all stages.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides of the config of the RLHF run.

    Raises:
        UserError: an argument or the config of a stage is invalid; no stage was started.
    """
    console.quiet = not is_first_rank()
    split = own.get("split", "validation")
    check_split(split)
    check_push(own.get("push_to"))
    cfg, named = config_of(overrides)
    cfg, before = embedded_chain(cfg) if cfg.task.embedded else stored_chain(cfg, named)
    folder = RunFolder(folder_of(cfg))
    chain = [
        *before,
        trained(f"RLHF ({cfg.algo.name})", folder, partial(train, cfg, folder, claim=nullcontext)),
        evaluation(folder, split),
    ]
    with claimed(folder.path) if is_first_rank() else nullcontext():
        carry_out(chain, cfg)
    if (repository := own.get("push_to")) and is_first_rank():
        artefacts.push_run(folder, repository)


if __name__ == "__main__":
    main()
