"""The types of the catalogue: an entry states a fault, a command, a moment and the required outcome."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.trial import Trial

Act = Callable[["Trial"], None]

# Phases that `inside/sitecustomize.py` reports. Before the first phase, a moment refers to files.
START = "start"  # the process has started
LOAD = "load"  # the run folder has a config.yaml
PHASES = ("wait", "score", "annotate", "train", "sync", "row", "evaluation", "checkpoint", "model")

# Random delays in seconds after the begin of a phase; phases of tiny runs take 5 to 100 ms.
SPREAD = {START: 0.4, LOAD: 0.5, "row": 0.02, "checkpoint": 0.03, "model": 0.02}
USUAL_SPREAD = 0.06


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run: the begin of a phase, plus a random delay.

    Args:
        phase: START, LOAD, or one of PHASES; a text with a dot is the name of a file relative to the trial's
            folder, as a glob pattern, and the moment is when the file exists.
        counts: the phase begins for the n-th time, where n is drawn from these numbers.
        spread_s: upper bound of the delay in seconds; None: the default of the phase.
    """

    phase: str
    counts: tuple[int, ...] = (1,)
    spread_s: float | None = None

    def draw(self, draw: random.Random) -> tuple[int, float]:
        """Return the count and the delay in seconds."""
        spread = SPREAD.get(self.phase, USUAL_SPREAD) if self.spread_s is None else self.spread_s
        return draw.choice(self.counts), draw.uniform(0, spread)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The required outcome of a command with a fault.

    In every outcome: no process, temporary file or shared memory is left, no secret is printed or saved, and
    the output has no Python traceback.

    Args:
        codes: the exit codes that are allowed, with a pattern that the output must contain for this code.
            A process that a signal ended has the negative number of the signal.
        same: the results are those of an uninterrupted run. If the exit code is not 0, the same command is
            run again before, and must end with exit code 0.
        reported: a pattern; if the output contains the pattern, the results may differ.
        second: like `codes`, for the second command of the trial.
        traceback: a traceback is allowed.
        gone: the fault removes this folder, and a run that does not need it does not make it again.
        grace_s: seconds in which the processes of the run must end, after the command has ended.
    """

    codes: Mapping[int, str]
    same: bool = True
    reported: str | None = None
    second: Mapping[int, str] = field(default_factory=dict)
    traceback: bool = False
    gone: str = ""
    grace_s: float = 15.0


def codes(*numbers: int, **patterns: str) -> dict[int, str]:
    """Return exit codes: numbers without a pattern, and `_<code>="pattern"`."""
    return {number: "" for number in numbers} | {int(key[1:]): text for key, text in patterns.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A fault that is injected into a command.

    Args:
        name: unique name.
        group: the row of the table in results.md, and its part, as `part: fault`.
        run: name of the command (`runs.RUNS`).
        act: injects the fault. It is called at the moment `at`; without a moment, before the command starts.
        outcome: the required outcome.
        at: the moment; None: before the command starts.
        begin: the state of the trial's folder before the command starts: "new", "crashed" (the run was killed
            after its third checkpoint) or "finished".
        repair: removes the cause before the same command is run again.
        needs: a requirement: "root", "vllm", "deepspeed" or "".
        fresh: start Python anew instead of a fork of a server that has imported the libraries.
        words: further arguments.
        prepare: changes the folder of the trial before anything else.
    """

    name: str
    group: str
    run: str
    act: Act
    outcome: Outcome = Outcome({0: ""})
    at: Moment | None = None
    begin: str = "new"
    repair: Act | None = None
    needs: str = ""
    fresh: bool = False
    words: tuple[str, ...] = ()
    prepare: Act | None = None
