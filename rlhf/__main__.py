"""Command `rlhf <command> [arguments]`, the same as `python -m rlhf.<command> [arguments]`.

This module imports no Hydra and no torch. A command is imported when it runs.

Exit codes: 2 if the command does not exist, else the exit code of the command.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from rlhf.core.errors import report
from rlhf.core.launched import __version__
from rlhf.terminal.console import prepare_output, print_error

COMMANDS = {  # command, a module of this package -> description
    "train": "Train a model; with -m a sweep of runs.",
    "inspect": "Check a run, and print its models, data and tokenized examples.",
    "plan": "Print the memory that a run needs.",
    "pipeline": "Train SFT model, reward model and policy, and evaluate the policy.",
    "evaluate": "Evaluate the checkpoints of a run, and other models.",
    "extend": "Train a run longer.",
    "sample": "Talk to a model, or show the last responses of a run.",
    "serve": "Start a server of vLLM that samples for runs on other machines.",
    "relabel": "Label the preference pairs of a task by a judge.",
    "study": "Evaluate a study of methods, axes and seeds: tables and claims.",
    "bundle": "Repeat one update of a run, and write all that it computes.",
    "replay": "Compute the update of a bundle again, and compare the numbers.",
    "diff": "Name the first number in which two updates differ.",
    "report": "Write a page of figures and print a table of run folders.",
    "audit": "Recompute a training step that any framework dumped.",
}
_OPTIONS = {
    "--help": "Print this text; for a command: rlhf <command> --help.",
    "--version": "Print the version.",
    "--completion bash": "Print the script for tab completion in bash.",
}
_HELP = """\
Train language models from human feedback, synchronously or asynchronously.

Usage: rlhf <command> [arguments]

Commands
{commands}

Options
{options}

Examples
  rlhf train algo=dpo                  a run: CPU, no download
  rlhf train algo=dpo debug=tiny       two updates of the run, as a test
  rlhf train --help algo               options and keys of the group algo

rlhf <command> is the same as python -m rlhf.<command>."""


def main() -> None:
    """Run the command line."""
    prepare_output()
    first, *others = sys.argv[1:] or ["--help"]
    if first in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"rlhf.{first}", run_name="__main__", alter_sys=True)
    elif first in ("--help", "-h"):
        print(_HELP.format(commands=_table(COMMANDS, 12), options=_table(_OPTIONS, 23)))
    elif first == "--version":
        print(f"rlhf {__version__}")
    elif first == "--completion":
        from importlib.resources import files

        if others != ["bash"]:
            got = " ".join(others) or "nothing"
            _refuse(f"--completion must be followed by bash, got {got}; run: rlhf --completion bash")
        print((files("rlhf.launch") / "completion.bash").read_text(encoding="utf-8"), end="")
    elif first == "--complete":  # for the scripts of --completion
        print("".join(f"{each}\n" for each in _completions(others)), end="")
    else:
        close = get_close_matches(first.removeprefix("rlhf."), COMMANDS, n=1)
        remedy = f"run: {shlex.join(['rlhf', close[0], *others])}" if close else "see rlhf --help"
        if "=" in first or first.startswith("-"):
            remedy = f"run: {shlex.join(['rlhf', 'train', first, *others])}"
        _refuse(f"rlhf must be followed by a command ({', '.join(COMMANDS)}), got {first}; {remedy}")


def _table(rows: dict[str, str], width: int) -> str:
    """Return the lines of a table; its first column has `width` characters."""
    return "\n".join(f"  {name:{width}}{means}" for name, means in rows.items())


def _completions(words: list[str]) -> list[str]:
    """Return what can stand in place of the last word of a command line.

    Args:
        words: the words after `rlhf` up to the cursor. The last word is unfinished, and may be empty.
    """
    command, *arguments = words or [""]
    if not arguments:
        options = [option.partition(" ")[0] for option in _OPTIONS]
        return [name for name in (*COMMANDS, *options) if name.startswith(command or tuple(COMMANDS))]
    files = ("audit", "bundle", "diff", "replay", "report", "serve", "study")  # their arguments are files
    if command not in COMMANDS or command in files:
        return []
    from rlhf.launch.command_line import candidates

    module = import_module(f"rlhf.{command}")
    return candidates(arguments, module.COMMAND.own if command != "train" else ())


def _refuse(problem: str) -> NoReturn:
    """Print an error, and end with exit code 2."""
    print_error(report([problem]))
    raise SystemExit(2)


if __name__ == "__main__":
    main()
