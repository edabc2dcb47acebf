"""Common parts of the commands: arguments, `--help`, and exit codes, which `rlhf.train` lists.

This module imports no torch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from rlhf.checks.rules import check_arguments
from rlhf.config import plugins
from rlhf.config.arguments import flag_problem, readable, texts
from rlhf.config.catalogue import conf_dir
from rlhf.config.cores import set_environment
from rlhf.config.reproduction import settings
from rlhf.config.saved import load_config
from rlhf.core.errors import Interrupted, RunError, UserError, report
from rlhf.core.launched import is_first_rank, rank
from rlhf.core.output import prepare_output, print_error
from rlhf.core.pasting import setting
from rlhf.launch import slurm
from rlhf.processes.signals import Interruption, interruptible

_CTRL_C = 128 + signal.SIGINT  # exit code after Ctrl-C

WIDTH = 80
FLAGS = ("--help", "--config-dir", "-cd")  # flags of the commands other than rlhf.train
_OPTIONS = "Groups, options and keys: python -m rlhf.train --help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with arguments of its own (such as `run=<folder>`) in addition to overrides of the config.

    Attributes:
        name: module of the command, rlhf.<name>.
        usage: arguments after the name, for `--help`.
        does: description for `--help`.
        own: the command's own arguments: name -> meaning.
        lists: names of own arguments that are lists of texts; `rlhf.config.arguments.texts` reads them.
    """

    name: str
    usage: str
    does: str
    own: dict[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()

    def run(self, carry_out: Callable[[dict[str, str], list[str]], None]) -> None:
        """Parse the command line, and call `carry_out` with the command's own arguments and the overrides.

        Raises:
            SystemExit: the command failed or was interrupted; see `exit_codes`.
        """
        prepare_output()
        arguments = sys.argv[1:]
        if "--help" in arguments or "-h" in arguments:
            print(self.help())
            return
        set_environment()
        slurm.name_rank()
        with exit_codes():
            plugins.load()
            carry_out(*self.split(arguments))

    def help(self) -> str:
        """Return the text of `--help`."""
        command = f"Usage: python -m {self.name} "
        words = re.findall(r"\[[^\]]*\]|\S+", self.usage)  # never break the line within brackets
        usage = textwrap.wrap(
            " ".join(word.replace(" ", "\0") for word in words),
            WIDTH,
            initial_indent=command,
            subsequent_indent=" " * len(command),
            break_on_hyphens=False,
        )
        rows = [
            textwrap.fill(meaning, WIDTH, initial_indent=f"  {name + '=':12}", subsequent_indent=" " * 14)
            for name, meaning in self.own.items()
        ]
        usage = [line.replace("\0", " ") for line in usage]
        return "\n".join([*usage, "", self.does, "", *rows, *([""] if rows else []), _OPTIONS])

    def split(self, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
        """Return the command's own arguments (name -> value) and the overrides.

        `--config-dir` is not in the result, because `rlhf.config.catalogue` reads it from the command line.

        Raises:
            UserError: a flag or the folder of `--config-dir` does not exist, or one of the command's own
                arguments is repeated or empty.
        """
        check_arguments(arguments)
        own: dict[str, str] = {}
        overrides: list[str] = []
        for argument in _without_config_dir(arguments, self.own):
            name, _, value = argument.partition("=")
            if name not in self.own:
                overrides += readable([argument])
                continue
            if not value or name in own:
                wrong = "given once" if name in own else "followed by a value"
                raise UserError(f"{name}= must be {wrong} ({self.own[name]}), got {argument}; see --help")
            quoted = value[0] == value[-1] == '"' and name not in self.lists
            own[name] = texts(value)[0] if quoted else value
        return own, overrides

    def required(self, own: dict[str, str], name: str, overrides: list[str]) -> str:
        """Return the value of a required argument.

        Raises:
            UserError: the argument is missing; the message suggests the override with the closest name.
        """
        if name in own:
            return own[name]
        for word in overrides:
            if "=" not in word and Path(word).is_dir():
                raise UserError(
                    f"{name}= is required ({self.own[name]}), got {word}; set {setting(name, word)}"
                )
        close = get_close_matches(name, [override.partition("=")[0] for override in overrides], n=1)
        guess = f"did you mean {name}= instead of {close[0]}=?" if close else f"add {name}=<...>"
        raise UserError(f"{name}= is required ({self.own[name]}), got no {name}=; {guess}")


def help_topics(arguments: Sequence[str]) -> list[str] | None:
    """Return the words after `--help` that are no overrides and no flags; None: there is no `--help`."""
    for place, argument in enumerate(arguments):
        flag, _, topic = argument.partition("=")
        if flag in ("--help", "-h"):
            words = [topic] if topic else arguments[place + 1 :]
            return [word for word in words if "=" not in word and not word.startswith("-")]
    return None


def checked_arguments(arguments: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a command as Hydra reads them: overrides first, some values in quotes.

    Args:
        arguments: the command line without the name of the command.
        flags: the flags of the command, and whether a value follows each flag.

    Raises:
        UserError: the arguments contain another flag or a secret.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before not in ("--config-dir", "-cd", "--config-name", "-cn"):
            _check_saved_config(argument)
    if problem := flag_problem(arguments, flags):
        raise UserError(problem)
    check_arguments(arguments)
    overrides: list[str] = []
    others: list[str] = []
    before = folder = ""
    for argument in arguments:
        is_value = flags.get(before, False) and not argument.startswith("-")
        if (is_value and before in ("--config-dir", "-cd")) or argument.startswith("--config-dir="):
            _check_config_dir(folder := argument if is_value else argument.partition("=")[2])
        if (is_value and before in ("--config-name", "-cn")) or argument.startswith("--config-name="):
            _check_config_name(argument if is_value else argument.partition("=")[2], folder)
        (others if is_value or argument.startswith("-") else overrides).append(argument)
        before = argument
    return [*readable(overrides), *others]


def _without_config_dir(arguments: list[str], own: Collection[str] = ()) -> list[str]:
    """Return the arguments without `--config-dir <folder>`, which `rlhf.config.catalogue` reads.

    Args:
        arguments: the command line without the name of the command.
        own: names of the command's own arguments.

    Raises:
        UserError: the folder does not exist, or the arguments contain another flag.
    """
    if problem := flag_problem(arguments, FLAGS, own):
        raise UserError(problem)
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--config-dir", "-cd"):
            _check_config_dir(next(rest, ""))
        elif argument.startswith("--config-dir="):
            _check_config_dir(argument.partition("=")[2])
        else:
            kept.append(argument)
    return kept


def _check_config_dir(folder: str) -> None:
    """Raise UserError if the folder of `--config-dir` does not exist, has no options, or is that of a run."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"--config-dir must name a folder laid out like conf/, got {folder}; fix the path")
    own = any((path / group.name).is_dir() for group in conf_dir().iterdir())
    if command := next(
        filter(None, map(_saved_command, [path, *(() if own else path.glob("*.yaml"))])), None
    ):
        raise UserError(
            f"--config-dir must name a folder laid out like conf/, got {folder} with the config of a run "
            f"(its settings would not be used); to run its config: {command}"
        )
    if not own:
        raise UserError(
            "--config-dir must name a folder laid out like conf/ (with option files such as "
            f"algo/mine.yaml), got {folder} without a folder of options; fix the path"
        )


def _check_config_name(name: str, folder: str) -> None:
    """Raise UserError if `--config-name` names a file in the folder of `--config-dir`."""
    file = Path(folder) / f"{name.removesuffix('.yaml')}.yaml"
    if folder and file.is_file():
        command = _saved_command(file)
        remedy = f"to run its config: {command}" if command else f"name options in {folder}, as algo=mine"
        raise UserError(f"--config-name must be left out, got {name}; {remedy}")


def _check_saved_config(argument: str) -> None:
    """Raise UserError if an argument is the path of a run or of its config, perhaps as the value of a name.

    Names such as `config`, which are no settings, are meant. The message has the command of the config.
    """
    name, equals, value = argument.partition("=")
    if equals and name.lstrip("-") not in ("config", "config_file", "config-file", "run", "experiment"):
        return
    if command := _saved_command(Path(value if equals else argument)):
        raise UserError(
            f"{argument} must be settings, as key=value or group=option, got the config of a run; to run its "
            f"config: {command}"
        )


def _saved_command(path: Path) -> str | None:
    """Return the command that runs a saved config: a run folder or its config.yaml; None: it is neither."""
    try:
        file = path / "config.yaml" if path.is_dir() else path
        found = settings(load_config(file)) if file.suffix == ".yaml" and file.is_file() else None
    except (UserError, OSError, ValueError):
        return None
    if found is None:
        return None
    return " ".join(["python -m rlhf.train", *(setting(key, value) for key, value in found.items())])


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors and signals of the block into a message and an exit code.

    Raises:
        SystemExit: with code 2 after a UserError, 1 after a RunError, 130 after Ctrl-C, 75 after another
            signal.
    """
    try:
        with interruptible() as interruption, _not_replaced(interruption):
            _check_current_folder()
            yield
    except (UserError, RunError) as error:
        stop(error)
    except Interrupted as reason:
        if is_first_rank():
            print_error(str(reason))
        raise SystemExit(_CTRL_C if reason.received is signal.SIGINT else os.EX_TEMPFAIL) from None
    except KeyboardInterrupt:
        if is_first_rank():
            print_error("interrupted by Ctrl-C; the same command resumes from the last checkpoint, if any")
        raise SystemExit(_CTRL_C) from None


@contextmanager
def _not_replaced(interruption: Interruption) -> Iterator[None]:
    """Raise Interrupted in place of an error that a library made of the exception of a signal handler.

    The import of numpy, for example, turns KeyboardInterrupt into ImportError.
    """
    try:
        yield
    except Exception:
        if interruption.raised:
            interruption.check()
        raise


def _check_current_folder() -> None:
    """Raise UserError if the current folder was deleted, for example in another terminal."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "the current folder must exist (paths begin there), got a folder that was deleted; change to an "
            "existing folder: cd <folder>"
        ) from None


def stop(error: RunError | UserError) -> NoReturn:
    """Print an error and end the command: exit code 2 for a UserError, 1 for a RunError.

    Rank 0 prints every error. Another rank prints an error that only this rank raised.
    """
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if is_first_rank():
        print_error(report(problems))
    elif not error.everywhere:
        print_error(f"rank {rank()}: {report(problems)}")
    raise SystemExit(2 if isinstance(error, UserError) else 1)
