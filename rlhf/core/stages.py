"""The stages of a command (SFT model, preference pairs, ...): numbers, names and total time for the terminal.

    stages = Stages(["SFT model", "preference pairs", "dpo"])
    with stages.enter(1):  # until the end of the block, titles of progress displays begin with "[1/3]"
        ...

This module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf.core.console import say
from rlhf.core.formatting import clock


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a command.

    Attributes:
        name: name for titles.
        number: number of the stage, from 1.
        count: number of stages.
        began: time.monotonic() at the start of the first stage.
        skipped: number of earlier stages that were finished before.
    """

    name: str
    number: int
    count: int
    began: float
    skipped: int = 0

    @property
    def prefix(self) -> str:
        """The number for titles, such as "[1/4] "; empty if the command has one stage."""
        return numbered(self.number, self.count)

    def total_s(self, left_s: float) -> float | None:
        """Return about how many seconds all stages take; None if no stage follows.

        The time of a later stage is not known, so it counts as the mean of the stages so far.

        Args:
            left_s: seconds that this stage still takes.
        """
        if self.number == self.count:
            return None
        made = self.number - self.skipped
        return (time.monotonic() - self.began + left_s) * (self.count - self.skipped) / made


current: Stage | None = None  # the stage that this process is in
job = ""  # the beginning of all titles, such as "job 2 ", if jobs of a sweep share the terminal


def prefix() -> str:
    """Return the number of the current stage for titles, such as "[1/4] "; empty without stages."""
    return current.prefix if current else job


def title(name: str) -> str:
    """Return the number and name of the current stage; `name` if the command has one stage."""
    return prefix() + (current.name if current and current.count > 1 else name)


class Stages:
    """The stages of a command, in order.

    If the command is a stage itself (a run as a stage of `rlhf.pipeline`), the outer stage stays the current
    stage, and the methods print nothing.

    Args:
        names: names of the stages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.began = time.monotonic()
        self.skipped = 0

    @property
    def outermost(self) -> bool:
        """Whether the command is not a stage itself; between its stages only."""
        return current is None

    @contextmanager
    def enter(self, number: int) -> Iterator[None]:
        """Make stage `number` (from 1) the current stage during the block."""
        global current
        outer = current
        if outer is None:
            name, count = self.names[number - 1], len(self.names)
            current = Stage(name, number, count, self.began, self.skipped)
        try:
            yield
        finally:
            current = outer

    @contextmanager
    def run(self, number: int, folder: Path) -> Iterator[None]:
        """Enter stage `number`, and print its folder at the start and its time at the end."""
        outer, started = current, time.monotonic()
        with self.enter(number):
            if outer is None:
                say(f"{self.title(number)}: {folder}", style="bold")
            yield
            if outer is None:
                say(f"{self.title(number)}: done in {clock(time.monotonic() - started)}", style="bold")

    def skip(self, number: int, folder: Path) -> None:
        """Print that stage `number` was finished before."""
        self.skipped += 1
        if current is None:
            say(f"{self.title(number)}: finished, in {folder}", style="bold")

    def prefix(self, number: int) -> str:
        """Return the number for titles in stage `number`, such as "[1/4] "; empty if there is one stage."""
        return current.prefix if current else numbered(number, len(self.names))

    def title(self, number: int) -> str:
        """Return the title of stage `number`, such as "[1/4] SFT model"."""
        return numbered(number, len(self.names)) + self.names[number - 1]


def numbered(number: int, count: int) -> str:
    """Return the number of a stage for titles, such as "[1/4] "; empty if there is one stage."""
    return job + (f"[{number}/{count}] " if count > 1 else "")
