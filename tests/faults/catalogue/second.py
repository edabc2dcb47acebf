"""A second process with the same folders, and jumps of the clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

from tests.faults.catalogue.signals import ANY, KILL
from tests.faults.entry import LOAD, START, Act, Entry, Moment, Outcome, codes
from tests.faults.trial import Trial

OWNER = r"process \d+ on \S+"  # the message names the process that uses the folder
HOUR_S = 3600.0


def second(*words: str) -> Act:
    """Return an act that starts the same command once more, with further arguments."""

    def act(trial: Trial) -> None:
        trial.second = trial.start(arguments=[*trial.run.arguments, *words])
        trial.note(f"second command {' '.join(words)}")

    return act


def another(module: str, *words: str) -> Act:
    """Return an act that starts another command."""

    def act(trial: Trial) -> None:
        trial.second = trial.start(module, words)
        trial.note(f"{module} {' '.join(words)}")

    return act


def killed_then_again(trial: Trial) -> None:
    """Kill the command and start the command again at once."""
    for process in trial.roles("trainer"):
        process.send(KILL)
    trial.session.process.wait()
    trial.second = trial.start()
    trial.note("killed and started again at once")


def twice() -> Iterator[Entry]:
    """Yield the entries of a second process."""
    for run in ("hf", "lag", "stages", "ppo", "sft"):
        for i, late in enumerate((0.0, 2.5)):
            yield Entry(
                f"twice.{run}.{i}",
                "Second process: the same command twice",
                run,
                second(),
                Outcome(codes(0, _2=OWNER), second=codes(0, _2=OWNER)),
                at=Moment(START, spread_s=late),
            )
    for run in ("evaluate", "relabel", "extend", "pipeline", "sweep", "sweep_local"):
        for i, late in enumerate((0.1, 2.0)):
            listed = codes(0, _2=OWNER, _1=OWNER) if run.startswith("sweep") else codes(0, _2=OWNER)
            yield Entry(
                f"twice.{run}.{i}",
                "Second process: `rlhf.evaluate`, `relabel`, `extend`, `pipeline` or a sweep twice",
                run,
                second(),
                Outcome(listed, second=listed),
                at=Moment(START, spread_s=late),
            )
    yield Entry(
        "twice.fresh",
        "Second process: the same command twice",
        "hf",
        second(),
        Outcome(codes(0, _2=OWNER), second=codes(0, _2=OWNER)),
        at=Moment(START, spread_s=2.5),
        fresh=True,
    )
    yield Entry(
        "twice.never",
        "Second process: the same command with `resume=never`, or `rlhf.extend`, of an active run",
        "lag",
        second("resume=never"),
        # the first command may end while the second starts
        Outcome(codes(0), second=codes(_2=OWNER, _0="moved the existing run")),
        at=Moment("wait", (2,)),
    )
    yield Entry(
        "twice.stages_shared",
        "Second process: another run needs the same missing SFT and reward model",
        "stages",
        second("seed=2"),
        Outcome(codes(0), second=codes(0), same=False),
        at=Moment(START, spread_s=2.5),
    )
    yield Entry(
        "twice.extend_active",
        "Second process: the same command with `resume=never`, or `rlhf.extend`, of an active run",
        "lag",
        another("rlhf.extend", "run=RUN", "schedule.total_episodes=96"),
        # 0: the run ended before the extension took its lock, so the run is longer
        Outcome(codes(0), second=codes(0, _2=""), reported="extending out/"),
        at=Moment("wait", (2,)),
    )
    yield Entry(
        "twice.report_active",
        "Second process: `rlhf.report` of an active run",
        "lag",
        another("rlhf.report", "out"),
        Outcome(codes(0), second=codes(0)),
        at=Moment("wait", (3,)),
    )
    yield Entry(
        "twice.after_kill",
        "Second process: started at once after `kill -9` of the first",
        "lag",
        killed_then_again,
        Outcome(codes(-9), second=codes(0)),
        at=ANY,
    )
    yield Entry(
        "twice.stopped",
        "Second process: the same command while the first process is stopped (SIGSTOP)",
        "hf",
        beside_a_stopped,
        Outcome(codes(0), second=codes(_2=OWNER)),
        at=Moment("train", (2,)),
    )


def beside_a_stopped(trial: Trial) -> None:
    """Start the same command while the first process is stopped."""
    (process,) = trial.roles("trainer")
    process.send(signal.SIGSTOP)
    trial.second = trial.start()
    end = time.monotonic() + 30
    while trial.second.code is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send(signal.SIGCONT)


# -- clock -----------------------------------------------------------------------------------------

JUMPS = {
    "hour_back": -HOUR_S,
    "hour_forward": HOUR_S,
    "day_back": -24 * HOUR_S,
    "years_forward": 10 * 365 * 24 * HOUR_S,
    "years_back": -10 * 365 * 24 * HOUR_S,
}


def jump(trial: Trial) -> None:
    """Let the clock of all processes of the run jump."""
    (trial.folder / "jumped").touch()
    trial.note("the clock jumps")


def by(seconds: float) -> Act:
    """Return a preparation of a jump of the clock."""

    def prepare(trial: Trial) -> None:
        trial.inside["clock"] = [str(trial.folder / "jumped"), seconds]

    return prepare


def clock() -> Iterator[Entry]:
    """Yield the entries of jumps of the clock."""
    for name, seconds in JUMPS.items():
        yield Entry(
            f"clock.{name}",
            "Clock: jumps of an hour to ten years, forward and back",
            "lag",
            jump,
            Outcome(codes(0)),
            at=ANY,
            prepare=by(seconds),
        )
    yield Entry(
        "clock.resume_earlier",
        "Clock: jumps of an hour to ten years, forward and back",
        "hf",
        jump,
        Outcome(codes(0)),
        begin="crashed",
        prepare=by(-24 * HOUR_S),
    )
    yield Entry(
        "clock.stages",
        "Clock: jumps of an hour to ten years, forward and back",
        "stages",
        jump,
        Outcome(codes(0)),
        at=Moment(LOAD, spread_s=3.0),
        prepare=by(-HOUR_S),
    )
    yield Entry(
        "clock.http",
        "Clock: jumps of an hour to ten years, forward and back",
        "http",
        jump,
        Outcome(codes(0)),
        at=ANY,
        prepare=by(HOUR_S),
    )


ENTRIES = (*twice(), *clock())
