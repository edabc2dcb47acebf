"""The terminal: one console, progress displays, the stages of a command, the phases of an update."""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from rlhf.core.formatting import GAP, clock, fitting, hide, lines_of, printable
from rlhf.core.launched import is_first_rank

if TYPE_CHECKING:
    from typing_extensions import Buffer


# stdout and stderr: output that cannot be shown, written or read does not end a command.


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write because the disk is full."""

    def write(self, data: Buffer, /) -> int:
        """Write bytes, and return their number; nothing is written if the disk is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(memoryview(data))


def prepare_output() -> None:
    """Keep stdout and stderr from ending the command.

    Every command calls this function first. A character that the encoding lacks is replaced, instead of
    raising UnicodeEncodeError. If stdout is a file and the disk is full, lines are dropped, instead of
    raising OSError.
    """
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        out = sys.stdout
        out.flush()
        raw = io.BufferedWriter(_LossyFile(out.fileno(), "w", closefd=False))
        by_line = out.line_buffering or out.write_through  # a terminal, or PYTHONUNBUFFERED
        sys.stdout = io.TextIOWrapper(raw, out.encoding, out.errors, line_buffering=by_line)
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def print_error(text: str) -> None:
    """Print lines to stderr without secrets, unless the reader of a pipe has gone.

    Control characters, which errors of the user's code may contain, are escaped. In a terminal, lines are
    divided between words.
    """
    text = "\n".join(map(printable, hide(text).split("\n")))
    if sys.stderr.isatty():
        text = "\n".join(map(_wrapped, text.splitlines()))
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard_closed_output()


def _wrapped(line: str) -> str:
    """Return a line, divided between words into lines that fit the terminal, with its indent."""
    indent = line[: len(line) - len(line.lstrip())]
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _discard_closed_output() -> None:
    """Redirect stdout and stderr to the null device if they are pipes whose reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        if any(events & select.POLLERR for _, events in poll.poll(0)):  # a pipe without a reader
            os.dup2(null, stream.fileno())
    os.close(null)


# The terminal: one console for log lines and progress bars, so that they do not overwrite each other.


_WIDTH_OF_FILES = 132  # columns of tables if the output is not a terminal
WIDTH_OF_LINES = 100  # most columns of a line of figures

transcript = logging.getLogger("rlhf.transcript")  # its messages go to train.log only
transcript.addHandler(logging.NullHandler())  # without a train.log, an error is not printed a second time


class Terminal(Console):
    """A console that does not end the command if the reader of a pipe (`| head`) has gone."""

    def on_broken_pipe(self) -> None:
        """Discard all later output of this process, and note this in train.log."""
        _discard_closed_output()
        transcript.warning("the terminal output was closed; the run continues, and train.log has all lines")


_IN_FILE = not sys.stdout.isatty() if sys.stdout else True
console = Terminal(
    highlight=False,
    emoji=False,
    soft_wrap=_IN_FILE,  # lines of a file are not wrapped; in a terminal, lines are wrapped between words
    width=_WIDTH_OF_FILES if _IN_FILE else None,
    force_jupyter=False,  # a notebook is a file: otherwise each line would be a display of its own
)


def show(text: str, style: str | None = None) -> None:
    """Print lines without secrets; in a terminal, divided between words, so that a long path stays whole."""
    text = hide(text)
    lines = text.splitlines() if _IN_FILE else map(_wrapped, text.splitlines())
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def say(text: str, style: str | None = None) -> None:
    """Print lines in the terminal and write them to train.log."""
    show(text, style)
    transcript.info(text)


def say_row(name: str, value: str) -> None:
    """Print a row of a summary, wrapped in a terminal, and write it to train.log as one line."""
    line = f"  {name + ':':24} {value}"
    width = 10**6 if _IN_FILE else console.width
    for part in textwrap.wrap(line, width, subsequent_indent=" " * 27, break_long_words=False):
        console.print(part, markup=False, soft_wrap=True)  # a long path can be copied
    transcript.info(line)


def say_items(title: str, items: Iterable[str]) -> None:
    """Print a title and items on as few lines as possible, and write them to train.log as one line."""
    parts = [title, *items]
    width = min(console.width, WIDTH_OF_LINES)
    for line in lines_of(parts, width, indent="  "):
        console.print(line, markup=False)
    transcript.info(GAP.join(parts))


def say_loading() -> None:
    """Print that torch and transformers are being imported, which takes seconds, unless they are already."""
    if "transformers" not in sys.modules and is_first_rank():
        console.print("loading torch and transformers ...")


# Progress: a live bar or plain lines, the stages of a command, the phases of an update.


# Progress displays: a live bar in a terminal, plain lines elsewhere.
#
#     [4/4] dpo tldr_mini  ------------            update 16/40  1:12 left
#       sampling 64/256  reward 1.460  KL 0.644  5,120 episodes
#
# The second line has the phase of the current update and the metrics of the last update.


_PLAIN_EVERY_S = 5.0  # seconds between plain progress lines
_PHASE_EVERY_S = 30.0  # seconds without a plain line after which the phase of a long update is printed
_REFRESHES = 4  # of the live bar per second
_BAR = (10, 30)  # fewest columns of the bar that leave the title whole, and most columns
_ESTIMATE_AFTER = (2.0, 0.02)  # seconds and fraction of the work after which all stages are estimated


class ProgressDisplay:
    """A progress display: a live bar, a plain line at most every 5 seconds, or nothing.

    At every width, title, count and time left are visible. Other items are omitted from the right.

    Args:
        title: the work in progress.
        total: units of work.
        mode: "live", "plain", "off", or "auto" (live in a terminal, otherwise plain).
        unit: name of a unit, printed before the count.
        done: units of work that are finished already.
        phases: phases within a unit of work. In plain lines, they are shown if a unit takes long.
    """

    def __init__(
        self,
        title: str,
        total: int,
        mode: str,
        *,
        unit: str = "",
        done: int = 0,
        phases: Phases | None = None,
    ) -> None:
        if mode == "auto":  # the bars of jobs in parallel would overwrite each other
            alone = not job and console.is_interactive and console.file.isatty()
            mode = "live" if alone else "plain"
        self.title, self.total, self.mode, self.unit, self.phases = title, total, mode, unit, phases
        self.first = self.done = done
        self.step = 0  # units that the last update finished
        self.items: Sequence[str] = ()
        self.started = self.updated = time.monotonic()
        self.warm: tuple[int, float] | None = None  # done and time.monotonic() after the first update
        self.last_line_at = -_PLAIN_EVERY_S  # time.monotonic() of the last plain line
        self.estimated = False  # whether the time of all stages was printed
        self.live: Live | None = None
        self.closed = threading.Event()
        self.speaker = threading.Thread(target=self.say_phases, name="progress", daemon=True)
        if self.mode == "plain" and phases is not None:
            self.speaker.start()
        if self.mode == "live":
            self.live = Live(self, console=console, refresh_per_second=_REFRESHES, transient=True)
            self.live.start()

    @property
    def count(self) -> str:
        """The finished units, such as "update 16/40"."""
        return f"{self.unit} {self.done:,}/{self.total:,}".lstrip()

    @property
    def phase(self) -> list[str]:
        """The phases within the current unit of work, as an item; nothing outside of all phases."""
        text = "" if self.phases is None else self.phases.text()
        return [text] if text else []

    @property
    def left_s(self) -> float | None:
        """The seconds left at the last update; None before the first unit is finished."""
        return None if self.pace_s is None else self.pace_s * (self.total - self.done)

    @property
    def pace_s(self) -> float | None:
        """The seconds of a unit so far; None before the first unit is finished.

        The first update is often slow (caches, processes that start), so it counts only at the beginning.
        """
        if self.done <= self.first:
            return None
        first, started = self.first, self.started
        if self.warm is not None and self.warm[0] < self.done:
            first, started = self.warm
        return (self.updated - started) / (self.done - first)

    def begin(self) -> None:
        """Estimate the time left from now on, because the work before the first unit is not repeated."""
        self.started = time.monotonic()

    def update(self, done: int, items: Sequence[str] = ()) -> None:
        """Show that `done` units are finished.

        Args:
            done: number of finished units.
            items: further items of the display, the most important first.
        """
        self.reach(done)
        self.items = items
        if self.mode == "off":
            return
        due = self.updated - self.last_line_at >= _PLAIN_EVERY_S or done >= self.total
        if self.mode == "plain" and due:
            self.last_line_at = self.updated
            say(self.line(min(console.width, WIDTH_OF_LINES)))
        early = self.updated - self.started < _ESTIMATE_AFTER[0] or done < _ESTIMATE_AFTER[1] * self.total
        if early or self.estimated:
            return
        self.estimated = True
        if current is None or (left_s := self.left_s) is None or (total_s := current.total_s(left_s)) is None:
            return
        of = f"all {len(current.names)} stages"
        say(f"{self.title}: {clock(left_s)} left; {of}: about {clock(total_s)}")

    def reach(self, done: int) -> None:
        """Count finished units without a new line or new items."""
        if done == self.done:
            return
        self.done, self.step, self.updated = done, done - self.done, time.monotonic()
        self.warm = self.warm or (done, self.updated)

    def say_phases(self) -> None:
        """Print a plain line whenever there was none for `_PHASE_EVERY_S`; runs in a thread of its own."""
        while not self.closed.wait(_PHASE_EVERY_S):
            if self.phase and time.monotonic() - self.last_line_at >= _PHASE_EVERY_S:
                self.last_line_at = time.monotonic()
                say(self.line(min(console.width, WIDTH_OF_LINES)))

    def line(self, width: int) -> str:
        """Return the state as a line: title, count, time left, phase, and as many items as fit in `width`."""
        head = [self.title, self.count, *left(self.left_s), *self.phase]
        return fitting([GAP.join(head), *self.items], width) or GAP.join(head)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line with the bar, and a line of the phase and the items if there are any."""
        from rich.text import Text

        width = options.max_width - 1  # some terminals wrap a line that ends in the last column
        left_s, pace_s = self.left_s, self.pace_s
        if left_s is not None and pace_s is not None:
            left_s -= min(time.monotonic() - self.updated, pace_s * self.step)
        after = GAP + GAP.join([self.count, *left(left_s)])
        title = fitting(self.title.split(" "), width - len(after) - _BAR[0] - len(GAP), " ") + GAP
        bar = min(_BAR[1], width - len(title) - len(after))
        full = bar * min(self.done, self.total) // max(1, self.total)
        done, rest = "#-" if options.ascii_only else "━─"
        yield Text.assemble(title, (done * full, "green"), (rest * (bar - full), "dim"), after, no_wrap=True)
        if items := fitting([*self.phase, *self.items], width - len(GAP)):
            yield Text(GAP + items, style="dim", no_wrap=True)

    def close(self) -> None:
        """Stop the display; a live bar is removed from the terminal."""
        self.closed.set()
        if self.speaker.is_alive():
            self.speaker.join()  # so that no line follows
        if self.live is not None:
            self.live.stop()


def left(seconds: float | None) -> list[str]:
    """Return the time left as an item, such as "1:12 left"; nothing if the time is unknown."""
    return [] if seconds is None else [f"{clock(seconds)} left"]


@contextmanager
def progress(title: str, total: int, mode: str) -> Iterator[Callable[..., None]]:
    """Show the progress of the block: a live bar, a plain line every 5 seconds, or nothing.

    Yields a function for the block to call with the number of units that were finished since the last call.

    Args:
        title: the work in progress; the number of the current stage is added.
        total: units of work.
        mode: value of the config key `progress`: "live", "plain", "off", or "auto" (live in a terminal,
            otherwise plain).
    """
    with closing(ProgressDisplay(prefix() + title, total, mode)) as display:
        yield lambda count=1: display.update(display.done + count)


# The stages of a command (SFT model, preference pairs, ...): numbers, names and total time for the terminal.
#
#     stages = Stages(["SFT model", "preference pairs", "dpo"])
#     with stages.enter(1):  # until the end of the block, titles of progress displays begin with "[1/3]"
#         ...


current: Stages | None = None  # the stages of the command, while this process is in one of them
job = ""  # the beginning of all titles, such as "job 2 ", if jobs of a sweep share the terminal


def prefix() -> str:
    """Return the number of the current stage for titles, such as "[1/4] "; empty without stages."""
    return job if current is None else current.numbered(current.number)


def title(name: str) -> str:
    """Return the number and name of the current stage; `name` if the command has one stage."""
    several = current is not None and len(current.names) > 1
    return prefix() + (current.names[current.number - 1] if current is not None and several else name)


class Stages:
    """The stages of a command, in order.

    If the command is a stage itself (a run as a stage of `rlhf.pipeline`), the outer stage stays the current
    stage, and the methods print nothing.

    Args:
        names: names of the stages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.number = 0  # of the current stage, from 1
        self.began = time.monotonic()
        self.skipped = 0  # stages that were finished before

    def total_s(self, left_s: float) -> float | None:
        """Return about how many seconds all stages take; None if no stage follows the current one.

        The time of a later stage is not known, so it counts as the mean of the stages so far.

        Args:
            left_s: seconds that the current stage still takes.
        """
        if self.number == len(self.names):
            return None
        spent_s = time.monotonic() - self.began + left_s
        return spent_s * (len(self.names) - self.skipped) / (self.number - self.skipped)

    @contextmanager
    def enter(self, number: int) -> Iterator[None]:
        """Make stage `number` (from 1) the current stage during the block."""
        global current
        outer = current
        if outer is None:
            self.number, current = number, self
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

    def numbered(self, number: int) -> str:
        """Return the number of a stage for titles, such as "[1/4] "; empty if there is one stage."""
        return job + (f"[{number}/{len(self.names)}] " if len(self.names) > 1 else "")

    def title(self, number: int) -> str:
        """Return the title of stage `number`, such as "[1/4] SFT model"."""
        return self.numbered(number) + self.names[number - 1]


# The phases of an update or of an evaluation, such as sampling and training, and their progress.
#
#     phases = Phases()
#     with phases("training", 4) as done:  # four optimizer steps
#         ...
#         done()                           # after each of them
#     phases.text()                        # meanwhile, for example "training 1/4, micro-batch 3/8"
#
# The parts of a run enter phases; a progress display reads them.


@dataclass(slots=True)
class _Phase:
    """A phase that is not finished.

    Attributes:
        name: the work, for the display.
        total: units of work; 0: not known.
        between: function to call after each unit of this phase and of the phases within it.
        began: time.monotonic() at the start.
        done: finished units.
    """

    name: str
    total: int
    between: Callable[[], None] | None
    began: float
    done: int = 0

    def __str__(self) -> str:
        """Return the name and the progress, such as "sampling 64/256"; without a total, the name."""
        return f"{self.name} {min(self.done, self.total):,}/{self.total:,}" if self.total > 1 else self.name


class Phases:
    """The nested phases that the main thread is in; another thread may read them."""

    def __init__(self) -> None:
        self.open: list[_Phase] = []  # the outermost first

    @contextmanager
    def __call__(
        self, name: str, total: int = 0, between: Callable[[], None] | None = None
    ) -> Iterator[Callable[..., None]]:
        """Enter a phase for the duration of the block.

        Yields a function for the block to call with the number of units that were finished since the last
        call, by default one.

        Args:
            name: the work, for the display.
            total: units of work; 0: not known.
            between: function to call after each unit of this phase and of the phases within it. It may raise
                an exception to end the work.
        """
        phase = _Phase(name, total, between, time.monotonic())

        def done(count: int = 1) -> None:
            phase.done += count
            for each in self.open:
                if each.between is not None:
                    each.between()

        self.open.append(phase)
        try:
            yield done
        finally:
            self.open.pop()

    def text(self) -> str:
        """Return the phases, such as "evaluating, sampling 64/256"; empty outside of all phases.

        An inner phase of one unit is left out. If no phase counts units, the seconds of the last one follow.
        """
        phases = self.open[:]
        shown = [*phases[:1], *(phase for phase in phases[1:] if phase.total != 1)]
        if not shown:
            return ""
        text = ", ".join(map(str, shown))
        seconds = time.monotonic() - shown[-1].began
        counted = any(phase.total > 1 for phase in shown)
        return text if counted or seconds < 1 else f"{text} {clock(seconds)}"
