"""Terminal output: one console for log lines and progress bars, so that they do not overwrite each other."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

WIDTH_OF_FILES = 132  # columns if the output is not a terminal
PLAIN_EVERY_S = 5.0  # seconds between plain progress lines

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
transcript = logging.getLogger("rlhf.transcript")  # its messages go to train.log only


def say(text: str, style: str | None = None) -> None:
    """Print a line in the terminal and write it to train.log."""
    console.print(text, style=style, markup=False)
    transcript.info(text)


class ProgressDisplay:
    """A progress display: a live bar, a plain line every 5 seconds, or nothing.

    Args:
        title: the work in progress.
        total: units of work.
        mode: "live", "plain", "off", or "auto" (live in a terminal, otherwise plain).
        done: units of work that are finished already.
        time_left: show percentage and time left in the live bar.
        transient: remove the live bar at the end.
    """

    def __init__(
        self,
        title: str,
        total: int,
        mode: str,
        *,
        done: int = 0,
        time_left: bool = False,
        transient: bool = False,
    ) -> None:
        self.title = title
        self.total = total
        self.mode = ("live" if console.is_terminal else "plain") if mode == "auto" else mode
        self.last_line_at = -PLAIN_EVERY_S  # time.monotonic() of the last plain line
        self.bar: Progress | None = None
        if self.mode == "live":
            columns = [TextColumn("{task.description}"), BarColumn(bar_width=20)]
            columns += [TaskProgressColumn(), TimeRemainingColumn()] if time_left else []
            columns += [TextColumn("{task.fields[text]}")]
            self.bar = Progress(*columns, console=console, transient=transient)
            self.task = self.bar.add_task(title, total=total, completed=done, text="")
            self.bar.start()

    def update(self, done: int, text: str) -> None:
        """Show that `done` units are finished, with `text` beside the bar or as the plain line."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text)
        elif self.mode == "plain":
            now = time.monotonic()
            if now - self.last_line_at >= PLAIN_EVERY_S or done >= self.total:
                self.last_line_at = now
                say(f"{self.title}  {text}")

    def close(self) -> None:
        """Stop the live bar; its last state stays visible unless `transient` is set."""
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def progress(
    title: str, total: int, mode: str, *, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show the progress of the block: a live bar, a plain line every 5 seconds, or nothing.

    Yields a function for the block to call with the number of units that were finished since the last call.

    Args:
        title: the work in progress.
        total: units of work.
        mode: value of the config key `progress`: "live", "plain", "off", or "auto" (live in a terminal,
            otherwise plain).
        transient: remove the live bar at the end.
    """
    display = ProgressDisplay(title, total, mode, time_left=True, transient=transient)
    done = 0

    def advance(count: int = 1) -> None:
        nonlocal done
        done += count
        display.update(done, f"{done:,} of {total:,}")

    try:
        yield advance
    finally:
        display.close()
