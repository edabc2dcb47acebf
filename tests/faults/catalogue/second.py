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


def beside_a_stopped(trial: Trial) -> None:
    """Start the same command while the first process is stopped."""
    (process,) = trial.roles("trainer")
    process.send(signal.SIGSTOP)
    trial.second = trial.start()
    end = time.monotonic() + 30
    while trial.second.code is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send(signal.SIGCONT)


def twice() -> Iterator[Entry]:
    """Yield the entries of a second process."""
    same = "Second process: the same command twice"
    others = "Second process: `rlhf.evaluate`, `relabel`, `extend`, `pipeline` or a sweep twice"
    active = "Second process: the same command with `resume=never`, or `rlhf.extend`, of an active run"
    one = Outcome(codes(0, _2=OWNER), second=codes(0, _2=OWNER))
    of_sweep = Outcome(codes(0, _2=OWNER, _1=OWNER), second=codes(0, _2=OWNER, _1=OWNER))
    late = Moment(START, spread_s=2.5)
    for run in ("hf", "lag", "stages", "ppo", "sft"):
        for i, at in enumerate((Moment(START, spread_s=0.0), late)):
            yield Entry(f"twice.{run}.{i}", same, run, second(), one, at)
    for run in ("evaluate", "relabel", "extend", "pipeline", "sweep", "sweep_local"):
        for i, delay in enumerate((0.1, 2.0)):
            outcome, at = of_sweep if run.startswith("sweep") else one, Moment(START, spread_s=delay)
            yield Entry(f"twice.{run}.{i}", others, run, second(), outcome, at)
    yield Entry("twice.fresh", same, "hf", second(), one, late, fresh=True)
    # the first command may end while the second starts
    outcome = Outcome(codes(0), second=codes(_2=OWNER, _0="moved the existing run"))
    yield Entry("twice.never", active, "lag", second("resume=never"), outcome, Moment("wait", (2,)))
    group = "Second process: another run needs the same missing SFT and reward model"
    outcome = Outcome(codes(0), second=codes(0), same=False)
    yield Entry("twice.stages_shared", group, "stages", second("seed=2"), outcome, late)
    # 0: the run ended before the extension took its lock, so the run is longer
    act = another("rlhf.extend", "run=RUN", "schedule.total_episodes=96")
    outcome = Outcome(codes(0), second=codes(0, _2=""), reported="extending out/")
    yield Entry("twice.extend_active", active, "lag", act, outcome, Moment("wait", (2,)))
    group, both = "Second process: `rlhf.report` of an active run", Outcome(codes(0), second=codes(0))
    yield Entry(
        "twice.report_active", group, "lag", another("rlhf.report", "out"), both, Moment("wait", (3,))
    )
    group, outcome = "Second process: started at once after `kill -9` of the first", codes(-9)
    yield Entry("twice.after_kill", group, "lag", killed_then_again, Outcome(outcome, second=codes(0)), ANY)
    group = "Second process: the same command while the first process is stopped (SIGSTOP)"
    outcome, at = Outcome(codes(0), second=codes(_2=OWNER)), Moment("train", (2,))
    yield Entry("twice.stopped", group, "hf", beside_a_stopped, outcome, at)


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
    group = "Clock: jumps of an hour to ten years, forward and back"
    for name, seconds in JUMPS.items():
        yield Entry(f"clock.{name}", group, "lag", jump, at=ANY, prepare=by(seconds))
    yield Entry("clock.resume_earlier", group, "hf", jump, begin="crashed", prepare=by(-24 * HOUR_S))
    at = Moment(LOAD, spread_s=3.0)
    yield Entry("clock.stages", group, "stages", jump, at=at, prepare=by(-HOUR_S))
    yield Entry("clock.http", group, "http", jump, at=ANY, prepare=by(HOUR_S))


ENTRIES = (*twice(), *clock())
