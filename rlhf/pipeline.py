from __future__ import annotations

from functools import partial
from pathlib import Path

from rlhf.config.identity import run_name
from rlhf.core.console import console, say
from rlhf.core.launched import is_first_rank
from rlhf.launch.command_line import Command
from rlhf.runs.folder import RunFolder
from rlhf.stages import hub
from rlhf.stages.chain import carry_out, config_of, embedded_chain, evaluation, stored_chain, train, training
from rlhf.stages.evaluation import check_split as evaluate_check_split

COMMAND = Command(
    name="rlhf.pipeline",
    usage="[split=test] [push_to=<owner>/<name>] [group=option ...] [key=value ...]",
    does=(
        "Makes the SFT model, preference pairs and the reward model, trains the policy, and evaluates it:\n"
        "one chain that skips what is there and goes on where it was ended. The words are those of the RLHF\n"
        "run; stages.sft=[...] and stages.reward=[...] are overrides of the stages before it."
    ),
    own={
        "split": "held-out split of the evaluation at the end: validation (default) or test",
        "push_to": hub.MEANS,
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], words: list[str]) -> None:
    """Carry out the chain that the words describe.

    Raises:
        UserError: a word is wrong, in one of the stages too; that is looked at before the first.
    """
    console.quiet = not is_first_rank()
    split = own.get("split", "validation")
    evaluate_check_split(split)
    hub.check(own.get("push_to"))
    cfg, named = config_of(words)
    cfg, before = embedded_chain(cfg) if cfg.task.embedded else stored_chain(cfg, named)
    folder = RunFolder(Path(cfg.output_dir) / run_name(cfg))
    chain = [
        *before,
        training(f"RLHF ({cfg.algo.name})", folder, partial(train, cfg, folder)),
        evaluation(folder, split),
    ]
    carry_out(chain, cfg)
    if (repository := own.get("push_to")) and is_first_rank():
        say(f"pushed to {hub.push_model(folder.model, repository)}")


if __name__ == "__main__":
    main()
