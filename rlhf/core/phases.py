"""The phases of an update or of an evaluation, such as sampling and training, and their progress.

    phases = Phases()
    with phases("training", 4) as done:  # four optimizer steps
        ...
        done()                           # after each of them
    phases.text()                        # meanwhile, for example "training 1/4, micro-batch 3/8"

The parts of a run enter phases; a progress display reads them. This module imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf.core.formatting import clock


@dataclass(slots=True)
class Phase:
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
        self.open: list[Phase] = []  # the outermost first

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
        phase = Phase(name, total, between, time.monotonic())

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
