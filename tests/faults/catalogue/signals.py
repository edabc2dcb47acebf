"""Signals to every process of a command, at random moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from tests.faults.entry import LOAD, START, Act, Entry, Moment, Outcome, codes
from tests.faults.trial import Trial

KILL, TERM, INT, USR1, SEGV = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGSEGV)
ECHO_S = 1.0  # two SIGTERMs within this time count as one (rlhf/processes/signals.py)

MOMENTS = {
    "start": Moment(START),
    "load": Moment(LOAD),
    "sampling": Moment("wait", (1, 2, 3, 4, 5)),
    "update": Moment("train", (1, 2, 3, 4, 5)),
    "sync": Moment("sync", (1, 2, 3, 4, 5)),
    "row": Moment("row", (1, 2, 3, 4, 5)),
    "checkpoint": Moment("checkpoint", (1, 2, 3, 4)),
    "evaluation": Moment("evaluation", (1, 2, 3)),
    "end": Moment("model"),
}
ANY = Moment("wait", (1, 2, 3, 4, 5), spread_s=0.3)


def to(role: str, number: int, count: int = 1, gap_s: float = 0.0) -> Act:
    """Return an act that sends a signal to a process of a role, `count` times."""

    def act(trial: Trial) -> None:
        process = trial.process(role)
        if process is None:
            trial.note(f"no {role}")
            return
        for i in range(count):
            if i:
                time.sleep(gap_s + trial.draw.uniform(0, 0.3))
            process.send(number)
            trial.note(f"{signal.Signals(number).name} to {role} {process.pid}")

    return act


def to_all(number: int, count: int = 1, gap_s: float = 0.0) -> Act:
    """Return an act that sends a signal to the process group of the command, as a terminal does."""

    def act(trial: Trial) -> None:
        for i in range(count):
            if i:
                time.sleep(gap_s + trial.draw.uniform(0, 0.3))
            try:
                os.killpg(trial.session.process.pid, number)
            except ProcessLookupError:
                return
            trial.note(f"{signal.Signals(number).name} to the process group")

    return act


def repeatedly(role: str, number: int, times: int) -> Act:
    """Return an act that ends `times` successive processes of a role."""

    def act(trial: Trial) -> None:
        struck: set[int] = set()
        end = time.monotonic() + 60
        while len(struck) < times and trial.session.code is None and time.monotonic() < end:
            for process in trial.roles(role):
                if process.pid not in struck:
                    struck.add(process.pid)
                    time.sleep(trial.draw.uniform(0, 0.3))
                    process.send(number)
            time.sleep(0.01)
        trial.note(f"{signal.Signals(number).name} to {len(struck)} processes of the {role}")

    return act


def stopped(role: str, least_s: float, most_s: float) -> Act:
    """Return an act that stops a process for a while."""

    def act(trial: Trial) -> None:
        process = trial.process(role)
        if process is not None:
            seconds = trial.draw.uniform(least_s, most_s)
            process.send(signal.SIGSTOP)
            time.sleep(seconds)
            process.send(signal.SIGCONT)
            trial.note(f"{role} {process.pid} stopped for {seconds:.1f} s")

    return act


SAVES = "after update .* checkpoint.*resumes"
OUTSIDE = "outside of training"
INTERRUPTED = f"{SAVES}|{OUTSIDE}|remaining jobs|interrupted by"

# Exit codes of the trainer by signal. Before the handlers are installed, a signal ends the process.
AFTER = {
    KILL: codes(-9),
    SEGV: codes(-11),
    TERM: codes(0, _75=INTERRUPTED),
    USR1: codes(0, _75=INTERRUPTED),
    INT: codes(0, _130=f"{INTERRUPTED}|interrupted"),
}
NAMES = {KILL: "kill", SEGV: "segv", TERM: "term", USR1: "usr1", INT: "int"}
SHOWN = {KILL: "`kill -9`", SEGV: "SIGSEGV", TERM: "SIGTERM", USR1: "SIGUSR1", INT: "Ctrl-C"}


def trainer() -> Iterator[Entry]:
    """Yield the entries of signals to the trainer, in every phase of a run."""
    run_of = {"start": "hf", "load": "lag", "sync": "lag", "sampling": "lag", "end": "hf"}
    for number in (KILL, TERM, INT, USR1):
        for phase, moment in MOMENTS.items():
            early = {START: {-number: ""}}.get(moment.phase, {})
            yield Entry(
                f"{NAMES[number]}.trainer.{phase}",
                f"Signals: {SHOWN[number]} of the trainer, in any phase of any run",
                run_of.get(phase, "hf"),
                to("trainer", number) if number != INT else to_all(INT),
                Outcome(AFTER[number] | early),
                at=moment,
                fresh=phase == "start" and number in (KILL, INT),
            )
    for phase in ("sampling", "update", "checkpoint"):
        yield Entry(
            f"segv.trainer.{phase}",
            "Signals: SIGSEGV of the trainer",
            "lag",
            to("trainer", SEGV),
            Outcome(AFTER[SEGV]),
            at=MOMENTS[phase],
        )
    for phase in ("load", "sampling", "update", "checkpoint"):
        yield Entry(
            f"stop.trainer.{phase}",
            "Signals: trainer, generator or annotator process stopped for up to 4 s (SIGSTOP)",
            "lag",
            stopped("trainer", 0.5, 4.0),
            Outcome(codes(0)),
            at=MOMENTS[phase],
        )
    twice = {TERM: codes(0, 75, 143), INT: codes(0, 130)}
    for number, allowed in twice.items():
        for phase in ("load", "sampling", "evaluation"):
            yield Entry(
                f"{NAMES[number]}_twice.trainer.{phase}",
                "Signals: two SIGTERMs or Ctrl-Cs, more than a second apart",
                "lag",
                to("trainer", TERM, 2, ECHO_S) if number == TERM else to_all(INT, 2, ECHO_S),
                Outcome(allowed),
                at=MOMENTS[phase],
            )
    kinds = ("grpo", "ppo", "lora", "sft", "reward", "rollouts", "replicas", "in_flight", "http", "http_lag")
    for run in kinds:
        for number in (KILL, TERM):
            yield Entry(
                f"{NAMES[number]}.{run}",
                f"Signals: {SHOWN[number]} of the trainer, in any phase of any run",
                run,
                to("trainer", number),
                Outcome(AFTER[number]),
                at=ANY,
            )
    for number in (KILL, TERM, INT):
        yield Entry(
            f"{NAMES[number]}.stages",
            f"Signals: {SHOWN[number]} of the trainer, in any phase of any run",
            "stages",
            to("trainer", number) if number != INT else to_all(INT),
            Outcome(AFTER[number]),
            at=Moment(LOAD, spread_s=4.0),
        )


def workers() -> Iterator[Entry]:
    """Yield the entries of signals to the generator and the annotator process."""
    for run, role in (
        ("lag", "generator"),
        ("lag", "annotator"),
        ("replicas", "generator"),
        ("in_flight", "generator"),
        ("http_lag", "annotator"),
    ):
        for number in (KILL, SEGV) if run == "lag" else (KILL,):
            yield Entry(
                f"{NAMES[number]}.{role}.{run}",
                "Signals: `kill -9` or SIGSEGV of a generator or annotator process",
                run,
                to(role, number),
                Outcome(codes(0)),
                at=ANY,
            )
    for role in ("generator", "annotator"):
        for name, moment in (("load", MOMENTS["load"]), ("evaluation", MOMENTS["evaluation"])):
            yield Entry(
                f"kill.{role}.{name}",
                "Signals: `kill -9` or SIGSEGV of a generator or annotator process",
                "lag",
                to(role, KILL),
                Outcome(codes(0)),
                at=moment,
            )
        for number in (TERM, INT, USR1):
            yield Entry(
                f"{NAMES[number]}.{role}",
                "Signals: SIGTERM, SIGUSR1 or Ctrl-C to a generator or annotator process",
                "lag",
                to(role, number),
                Outcome(codes(0), traceback=number == INT),
                at=ANY,
            )
        yield Entry(
            f"stop.{role}",
            "Signals: trainer, generator or annotator process stopped for up to 4 s (SIGSTOP)",
            "lag",
            stopped(role, 0.5, 4.0),
            Outcome(codes(0)),
            at=ANY,
        )
        yield Entry(
            f"kill_often.{role}",
            "Signals: generator or annotator process killed too often",
            "lag",
            repeatedly(role, KILL, 3),
            Outcome(codes(_1=rf"{role}.*restarts")),
            at=Moment(LOAD, spread_s=0.1),
            words=("generator.restarts=1",),
        )
        yield Entry(
            f"hang.{role}",
            "Signals: generator or annotator process stopped for ever",
            "lag",
            hang(role),
            Outcome(codes(0)),
            at=ANY,
            words=("generator.request_limit_s=4",),
        )


def hang(role: str) -> Act:
    """Return an act that stops a process for ever."""

    def act(trial: Trial) -> None:
        if (process := trial.process(role)) is not None:
            process.send(signal.SIGSTOP)
            trial.note(f"SIGSTOP to {role} {process.pid}")

    return act


ENTRIES = (*trainer(), *workers())
