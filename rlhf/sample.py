r"""Command `python -m rlhf.sample`: talk to a model, sample responses, or show the last responses of a run.

    python -m rlhf.sample run=<folder> [temperature=0.7] [response_length=256] [key=value ...]
    python -m rlhf.sample model=<folder or hub name> < prompts.txt
    python -m rlhf.sample run=<folder> show=4

Each line of the input is a prompt, and the command prints the response. If the model has a chat template, the
lines are the user's turns of a dialogue, and the line `/new` starts a new dialogue. Otherwise each line is
continued as it is; `\n` in a line means a line break.

With `show=`, the command loads no model. It prints responses of the last evaluation of a run, with their
rewards, whether and why they were cut, and which of their texts the model wrote.

Exit codes: 0 at the end of the input (Ctrl-D), else the exit codes of `rlhf.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.core.formatting import GAP, figure, printable
from rlhf.experiment import Experiment
from rlhf.launch.command_line import Command
from rlhf.loggers.logger import SCORES
from rlhf.models.folder import folder_problem
from rlhf.runs.folder import RunFolder
from rlhf.stages.evaluation import alone, changed, check_sampling, run_folder
from rlhf.terminal.console import console, say_items, say_loading

_NEW = "/new"  # the line that starts a new dialogue
COMMAND = Command(
    name="rlhf.sample",
    usage="run=<folder> [show=4] [temperature=0.7] [response_length=256] [chat=false] [key=value ...]",
    does=(
        "Reads prompts from the terminal or from standard input, one per line, and\n"
        "prints the responses of the final model of a run, or of the model of model=.\n"
        "With a chat template the lines are one dialogue; the line /new starts another.\n"
        "Ctrl-D ends the command. With show= no model is loaded."
    ),
    own={
        "run": "run folder; its final model is used",
        "show": "print this number of responses or episodes of the run's last evaluation, and end",
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
    COMMAND.run(_command)


def _command(own: dict[str, str], overrides: list[str]) -> None:
    """Print responses to the lines of standard input.

    Args:
        own: the command's own arguments, by name.
        overrides: overrides that change the config of the run, such as `backend.device=cpu`.

    Raises:
        UserError: the run or the model does not exist, or an argument is invalid.
    """
    if "show" in own:
        return show(run_folder(COMMAND.required(own, "run", overrides)), int(_number(own, "show", 4)))
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
        "temperature": _number(own, "temperature", cfg.generator.temperature),
        "response_length": int(_number(own, "response_length", length)),
    }
    seed = int(_number(own, "seed", 0))
    check_sampling(**settings)
    chats = {None: None, "true": True, "false": False}
    if (wanted := own.get("chat")) not in chats:
        raise UserError(f"chat= must be true or false, got {wanted}; set chat=true")
    say_loading()
    from rlhf.stages.inspection import Sampler

    sampler = Sampler(cfg, name, seed, chat=chats[wanted])
    start = [{"role": "system", "content": own["system"]}] if "system" in own else []
    messages = list(start)
    for line in _lines():
        if sampler.chat and line.strip() == _NEW:
            messages = list(start)
            continue
        if sampler.chat:
            messages.append({"role": "user", "content": line})
        prompt = list(messages) if sampler.chat else line.replace("\\n", "\n")
        (row,) = sampler([prompt], **settings)
        console.print(row["response"], markup=False, highlight=False, soft_wrap=True)
        messages.append({"role": "assistant", "content": row["response"]})


def show(folder: RunFolder, count: int) -> None:
    """Print the first `count` responses of the last evaluation of a run.

    Raises:
        UserError: the run has no responses of an evaluation.
    """
    if not (rows := read_lines(folder.completions, ["update", "prompt", "response"])):
        raise UserError(
            f"run= must have responses of an evaluation (show= prints them), got {folder.path}; evaluate the "
            "policy during training: set schedule.eval_every=1000000"
        )
    rows = [row for row in rows if row["update"] == rows[-1]["update"]]
    measured = [row for row in read_lines(folder.metrics) if "eval/eos_rate" in row]
    shares = [f"share that ended {figure(row['eval/eos_rate'])}" for row in measured[-1:]]
    say_items(f"evaluation at update {rows[0]['update']}: {len(rows)} responses", shares)
    for place, row in enumerate(rows[: max(count, 0)], 1):
        items = [f"{short} {figure(row[name])}" for name, short in SCORES.items() if name in row]
        fate = (f"cut: {row['limit']}" if row["limit"] else "ended") if "limit" in row else ""
        console.print(GAP.join([f"[{place}]", *items, fate]), markup=False)
        console.print(*_transcript(row), sep="\n", markup=False, soft_wrap=True)
    console.print("(+ written by the model: training counts the tokens of these texts only)")


def _transcript(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a row of completions.jsonl: who wrote what, and the reward of each reply."""
    turns = row.get("messages") or [{"role": "response", "content": row["response"]}]
    ends = [{"role": name, "content": row[name]} for name in ("prompt", "reference") if row.get(name)]
    for turn in [*ends[:1], *turns, *ends[1:]]:
        mark = "+" if turn["role"] in ("assistant", "response") else " "
        reward = f"(reward {figure(turn['reward'])}) " if "reward" in turn else ""
        first, *others = map(printable, turn["content"].splitlines() or ["(empty)"])
        yield f"  {mark} {turn['role'][:9]:9} {reward}{first}"
        yield from (f"{'':14}{line}" for line in others)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; ask for each line if a terminal is the input."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _number(own: dict[str, str], name: str, default: float) -> float:
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
