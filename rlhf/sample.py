r"""Command `python -m rlhf.sample`: talk to a model, or sample responses to the lines of a file.

    python -m rlhf.sample run=<folder> [temperature=0.7] [response_length=256] [key=value ...]
    python -m rlhf.sample model=<folder or hub name> < prompts.txt

Each line of the input is a prompt, and the command prints the response. If the model has a chat template, the
lines are the user's turns of a dialogue, and the line `/new` starts a new dialogue. Otherwise each line is
continued as it is; `\n` in a line means a line break.

Exit codes: 0 at the end of the input (Ctrl-D), else the exit codes of `rlhf.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rlhf.core.console import console, say_loading
from rlhf.core.errors import UserError
from rlhf.experiment import Experiment
from rlhf.launch.command_line import Command
from rlhf.models.folders import folder_problem
from rlhf.stages.evaluation_config import alone, changed, check_sampling

_NEW = "/new"  # the line that starts a new dialogue
COMMAND = Command(
    name="rlhf.sample",
    usage="run=<folder> [temperature=0.7] [response_length=256] [chat=false] [seed=0] [key=value ...]",
    does=(
        "Reads prompts from the terminal or from standard input, one per line, and\n"
        "prints the responses of the final model of a run, or of the model of model=.\n"
        "With a chat template the lines are one dialogue; the line /new starts another.\n"
        "Ctrl-D ends the command."
    ),
    own={
        "run": "run folder; its final model is used",
        "model": "in place of run=: model folder, such as <run>/checkpoint-10/model, or hub name",
        "temperature": "sampling temperature; 0.01 is almost greedy (default: that of the run)",
        "response_length": "limit in tokens (default: that of the run; without run= 256)",
        "chat": "true or false: whether lines are turns of a dialogue (default: true with a chat template)",
        "system": "system message of the dialogues",
        "seed": "seed of the samples (default: 0)",
    },
)


def main() -> None:
    """Run the command line."""
    COMMAND.run(command)


def command(own: dict[str, str], overrides: list[str]) -> None:
    """Print responses to the lines of standard input.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides that change the config of the run, such as `backend.device=cpu`.

    Raises:
        UserError: the run or the model does not exist, or an argument is invalid.
    """
    if "model" in own:
        name = own["model"]
        if "run" in own:
            raise UserError(
                f"model= must not be set with run= (each names a model), got {name}; leave one out"
            )
        if problem := folder_problem("model", name):
            raise UserError(problem)
        cfg, length = alone([name], ["task=tldr_mini", *overrides]), 256
    else:
        experiment = Experiment.open(COMMAND.required(own, "run", overrides))
        name, cfg = str(experiment.model), changed(experiment.files, overrides)
        length = cfg.generator.response_length
    settings: dict[str, Any] = {
        "samples": 1,
        "temperature": number(own, "temperature", cfg.generator.temperature),
        "response_length": int(number(own, "response_length", length)),
    }
    seed = int(number(own, "seed", 0))
    check_sampling(**settings)
    wanted = own.get("chat")
    if wanted not in (None, "true", "false"):
        raise UserError(f"chat= must be true or false, got {wanted}; set chat=true")
    say_loading()
    from rlhf.stages.sampling import Sampler

    sampler = Sampler(cfg, name, seed, chat=None if wanted is None else wanted == "true")
    start = [{"role": "system", "content": own["system"]}] if "system" in own else []
    messages = list(start)
    for line in lines():
        if sampler.chat and line.strip() == _NEW:
            messages = list(start)
            continue
        if sampler.chat:
            messages.append({"role": "user", "content": line})
        prompt = list(messages) if sampler.chat else line.replace("\\n", "\n")
        (row,) = sampler([prompt], **settings)
        console.print(row["response"], markup=False, highlight=False, soft_wrap=True)
        messages.append({"role": "assistant", "content": row["response"]})


def lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; ask for each line if a terminal is the input."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def number(own: dict[str, str], name: str, default: float) -> float:
    """Return an argument as a number.

    Raises:
        UserError: the argument is not a number.
    """
    try:
        return float(own.get(name, default))
    except ValueError:
        raise UserError(f"{name}= must be a number, got {own[name]}; set {name}={default:g}") from None


if __name__ == "__main__":
    main()
