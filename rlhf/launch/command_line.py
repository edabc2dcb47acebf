"""What the commands have in common: their words, `--help`, and how they end.

Exit codes are those of `rlhf.train`. Imports no torch.
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
from rlhf.core.launched import is_first_rank
from rlhf.launch import slurm
from rlhf.processes.signals import interruptible

OPTIONS = "For groups, options and keys: python -m rlhf.train --help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that takes words of its own (`run=<folder>`), and besides these the words of a run."""

    name: str  # rlhf.<module>
    usage: str  # what follows the name
    does: str  # in a sentence or more, for --help
    own: dict[str, str] = field(default_factory=dict)  # its own words: what each means

    def run(self, carry_out: Callable[[dict[str, str], list[str]], None]) -> None:
        """Carry out the command line: `carry_out` gets the own words by name, and the words of a run."""
        words = sys.argv[1:]
        if "--help" in words or "-h" in words:
            print(self.help())
            return
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as conf/config.yaml has it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        slurm.name_rank()
        with exit_codes():
            plugins.load()
            carry_out(*self.sorted(words))

    def help(self) -> str:
        """What --help shows."""
        rows = [
            textwrap.fill(means, 110, initial_indent=f"  {word + '=':12}", subsequent_indent=" " * 14)
            for word, means in self.own.items()
        ]
        return "\n".join(
            [f"usage: python -m {self.name} {self.usage}", "", self.does, "", *rows, "", OPTIONS]
        )

    def sorted(self, words: list[str]) -> tuple[dict[str, str], list[str]]:
        """The own words by name, and the words of a run; `--config-dir` is left to `rlhf.compose`.

        Raises:
            UserError: a flag that is none of this command, or an own word twice or without value.
        """
        own: dict[str, str] = {}
        rest: list[str] = []
        for word in without_config_dir(words):
            name, equals, value = word.partition("=")
            if name not in self.own:
                rest.append(word)
                continue
            if not value or name in own:
                wrong = "given once" if name in own else "followed by a value"
                raise UserError(f"{name}= must be {wrong} ({self.own[name]}), got {word}; see --help")
            own[name] = value
        return own, rest

    def needed(self, own: dict[str, str], name: str, words: list[str]) -> str:
        """The value of an own word that has to be given.

        Raises:
            UserError: it is not.
        """
        if name in own:
            return own[name]
        close = get_close_matches(name, [word.partition("=")[0] for word in words], n=1)
        guess = f"did you mean {name}= by {close[0]}=?" if close else f"add {name}=<...>"
        raise UserError(f"{name}= must be given ({self.own[name]}), got none; {guess}")


def without_config_dir(words: list[str]) -> list[str]:
    """The words without `--config-dir <folder>`, which `rlhf.options.conf_dirs` reads from the command line.

    Raises:
        UserError: it names no folder, or there is another flag.
    """
    kept = []
    rest = iter(words)
    for word in rest:
        if word in ("--config-dir", "-cd"):
            existing(next(rest, ""))
        elif word.startswith("--config-dir="):
            existing(word.partition("=")[2])
        elif word.startswith("-"):
            raise UserError(
                f"{word} must not be given (this command has no such flag), got {word}; leave it out"
            )
        else:
            kept.append(word)
    return kept


def existing(folder: str) -> None:
    """Raise UserError where `--config-dir` names no folder."""
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir must name a folder laid out like conf/, got {folder}; mend the path")


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process with an exit code and a message where what is carried out does not come to its end."""
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
    """End the command where a run had to stop; a rank that has an error of its own tells it too."""
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if is_first_rank():
        print(report(problems), file=sys.stderr)
    elif not error.everywhere:
        print(f"rank {os.environ['RANK']}: {report(problems)}", file=sys.stderr)
    raise SystemExit(2 if isinstance(error, UserError) else 1)
