"""Common parts of the commands: arguments, `--help`, and exit codes, which `rlhf.train` lists.

This module imports no torch.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from rlhf.config import plugins
from rlhf.core.errors import Interrupted, RunError, UserError, report
from rlhf.core.launched import is_first_rank, rank
from rlhf.launch import slurm
from rlhf.processes.signals import interruptible

OPTIONS = "Groups, options and keys: python -m rlhf.train --help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with arguments of its own (such as `run=<folder>`) in addition to overrides of the config.

    Attributes:
        name: module of the command, rlhf.<name>.
        usage: arguments after the name, for `--help`.
        does: description for `--help`.
        own: the command's own arguments: name -> meaning.
    """

    name: str
    usage: str
    does: str
    own: dict[str, str] = field(default_factory=dict)

    def run(self, carry_out: Callable[[dict[str, str], list[str]], None]) -> None:
        """Parse the command line, and call `carry_out` with the command's own arguments and the overrides.

        Raises:
            SystemExit: the command failed or was interrupted; see `exit_codes`.
        """
        arguments = sys.argv[1:]
        if "--help" in arguments or "-h" in arguments:
            print(self.help())
            return
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `hydra.job.env_set` in conf/config.yaml
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        slurm.name_rank()
        with exit_codes():
            plugins.load()
            carry_out(*self.split(arguments))

    def help(self) -> str:
        """Return the text of `--help`."""
        rows = [
            textwrap.fill(meaning, 110, initial_indent=f"  {name + '=':12}", subsequent_indent=" " * 14)
            for name, meaning in self.own.items()
        ]
        return "\n".join(
            [f"usage: python -m {self.name} {self.usage}", "", self.does, "", *rows, "", OPTIONS]
        )

    def split(self, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
        """Return the command's own arguments (name -> value) and the overrides.

        `--config-dir` is not in the result, because `rlhf.config.catalogue` reads it from the command line.

        Raises:
            UserError: a flag or the folder of `--config-dir` does not exist, or one of the command's own
                arguments is repeated or empty.
        """
        own: dict[str, str] = {}
        overrides: list[str] = []
        for argument in without_config_dir(arguments):
            name, _, value = argument.partition("=")
            if name not in self.own:
                overrides.append(argument)
                continue
            if not value or name in own:
                wrong = "given once" if name in own else "followed by a value"
                raise UserError(f"{name}= must be {wrong} ({self.own[name]}), got {argument}; see --help")
            own[name] = value
        return own, overrides

    def required(self, own: dict[str, str], name: str, overrides: list[str]) -> str:
        """Return the value of a required argument.

        Raises:
            UserError: the argument is missing; the message suggests the override with the closest name.
        """
        if name in own:
            return own[name]
        close = get_close_matches(name, [override.partition("=")[0] for override in overrides], n=1)
        guess = f"did you mean {name}= instead of {close[0]}=?" if close else f"add {name}=<...>"
        raise UserError(f"{name}= is required ({self.own[name]}), got no {name}=; {guess}")


def without_config_dir(arguments: list[str]) -> list[str]:
    """Return the arguments without `--config-dir <folder>`, which `rlhf.config.catalogue` reads.

    Raises:
        UserError: the folder does not exist, or the arguments contain another flag.
    """
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--config-dir", "-cd"):
            check_config_dir(next(rest, ""))
        elif argument.startswith("--config-dir="):
            check_config_dir(argument.partition("=")[2])
        elif argument.startswith("-"):
            raise UserError(
                f"{argument} must not be given (this command has no such flag), got {argument}; leave it out"
            )
        else:
            kept.append(argument)
    return kept


def check_config_dir(folder: str) -> None:
    """Raise UserError if the folder of `--config-dir` does not exist."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir must name a folder laid out like conf/, got {folder}; fix the path")


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors and signals of the block into a message and an exit code.

    Raises:
        SystemExit: with code 2 after a UserError, 1 after a RunError, 75 after a signal, 130 after Ctrl-C.
    """
    try:
        with interruptible():
            yield
    except (UserError, RunError) as error:
        stop(error)
    except Interrupted as reason:
        if is_first_rank():
            print(str(reason), file=sys.stderr)
        raise SystemExit(os.EX_TEMPFAIL) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def stop(error: RunError | UserError) -> NoReturn:
    """Print an error and end the command: exit code 2 for a UserError, 1 for a RunError.

    Rank 0 prints every error. Another rank prints an error that only this rank raised.
    """
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if is_first_rank():
        print(report(problems), file=sys.stderr)
    elif not error.everywhere:
        print(f"rank {rank()}: {report(problems)}", file=sys.stderr)
    raise SystemExit(2 if isinstance(error, UserError) else 1)
