"""Signals to every process of a command, at random moments: trainer, workers, ranks, sweeps, vLLM."""

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


def hang(role: str) -> Act:
    """Return an act that stops a process for ever."""

    def act(trial: Trial) -> None:
        if (process := trial.process(role)) is not None:
            process.send(signal.SIGSTOP)
            trial.note(f"SIGSTOP to {role} {process.pid}")

    return act


def ending(number: int, count: int = 1, gap_s: float = 0.0) -> Act:
    """Return an act that sends a signal to the trainer; Ctrl-C to all processes of the terminal."""
    return to_all(number, count, gap_s) if number == INT else to("trainer", number, count, gap_s)


OF = {number: f"Signals: {shown} of the trainer, in any phase of any run" for number, shown in SHOWN.items()}
STOPPED = "Signals: trainer, generator or annotator process stopped for up to 4 s (SIGSTOP)"


def trainer() -> Iterator[Entry]:
    """Yield the entries of signals to the trainer, in every phase of a run."""
    ahead = ("load", "sync", "sampling")  # phases of a run with a generator process
    for number in (KILL, TERM, INT, USR1):
        for phase, at in MOMENTS.items():
            outcome = Outcome(AFTER[number] | ({-number: ""} if phase == "start" else {}))
            new = phase == "start" and number in (KILL, INT)
            run, name = "lag" if phase in ahead else "hf", f"{NAMES[number]}.trainer.{phase}"
            yield Entry(name, OF[number], run, ending(number), outcome, at, fresh=new)
    for phase in ("sampling", "update", "checkpoint"):
        name, group = f"segv.trainer.{phase}", "Signals: SIGSEGV of the trainer"
        yield Entry(name, group, "lag", to("trainer", SEGV), Outcome(AFTER[SEGV]), MOMENTS[phase])
    for phase in ("load", "sampling", "update", "checkpoint"):
        act = stopped("trainer", 0.5, 4.0)
        yield Entry(f"stop.trainer.{phase}", STOPPED, "lag", act, at=MOMENTS[phase])
    group = "Signals: two SIGTERMs or Ctrl-Cs, more than a second apart"
    for number, allowed in ((TERM, codes(0, 75, 143)), (INT, codes(0, 130))):
        for phase in ("load", "sampling", "evaluation"):
            act, name = ending(number, 2, ECHO_S), f"{NAMES[number]}_twice.trainer.{phase}"
            yield Entry(name, group, "lag", act, Outcome(allowed), MOMENTS[phase])
    kinds = ("grpo", "ppo", "lora", "sft", "reward", "rollouts", "replicas", "in_flight", "http", "http_lag")
    for run in kinds:
        for number in (KILL, TERM):
            outcome = Outcome(AFTER[number])
            yield Entry(f"{NAMES[number]}.{run}", OF[number], run, ending(number), outcome, ANY)
    for number in (KILL, TERM, INT):
        at, outcome = Moment(LOAD, spread_s=4.0), Outcome(AFTER[number])
        yield Entry(f"{NAMES[number]}.stages", OF[number], "stages", ending(number), outcome, at)


def workers() -> Iterator[Entry]:
    """Yield the entries of signals to the generator and the annotator process."""
    killed = "Signals: `kill -9` or SIGSEGV of a generator or annotator process"
    asked = "Signals: SIGTERM, SIGUSR1 or Ctrl-C to a generator or annotator process"
    often = "Signals: generator or annotator process killed too often"
    for_ever = "Signals: generator or annotator process stopped for ever"
    for place in (
        *("lag generator", "lag annotator", "replicas generator", "in_flight generator"),
        "http_lag annotator",
    ):
        run, role = place.split()
        for number in (KILL, SEGV) if run == "lag" else (KILL,):
            yield Entry(f"{NAMES[number]}.{role}.{run}", killed, run, to(role, number), at=ANY)
    for role in ("generator", "annotator"):
        for phase in ("load", "evaluation"):
            yield Entry(f"kill.{role}.{phase}", killed, "lag", to(role, KILL), at=MOMENTS[phase])
        for number in (TERM, INT, USR1):
            outcome = Outcome(codes(0), traceback=number == INT)
            yield Entry(f"{NAMES[number]}.{role}", asked, "lag", to(role, number), outcome, ANY)
        yield Entry(f"stop.{role}", STOPPED, "lag", stopped(role, 0.5, 4.0), at=ANY)
        act, outcome = repeatedly(role, KILL, 3), Outcome(codes(_1=rf"{role}.*restarts"))
        at, words = Moment(LOAD, spread_s=0.1), ("generator.restarts=1",)
        yield Entry(f"kill_often.{role}", often, "lag", act, outcome, at, words=words)
        words = ("generator.request_limit_s=4",)
        yield Entry(f"hang.{role}", for_ever, "lag", hang(role), at=ANY, words=words)


def ranks() -> Iterator[Entry]:
    """Yield the entries of signals to ranks and to torchrun."""
    killed = "Ranks: `kill -9` or SIGSEGV of a rank"
    launcher = "Ranks: SIGTERM or Ctrl-C to torchrun"
    asked = "Ranks: SIGTERM or SIGUSR1 to a rank: all ranks save and stop"
    stops = codes(1, -15, 75, 143, 130) | {0: ""}  # torchrun has exit codes of its own
    lost, saved = Outcome(codes(1), grace_s=40), Outcome(stops, grace_s=40)
    for run in ("ranks", "ranks_lag", "zero2", "zero3"):
        for name, at in (("sampling", ANY), ("checkpoint", MOMENTS["checkpoint"])):
            yield Entry(f"kill.rank.{run}.{name}", killed, run, to("rank", KILL), lost, at)
    for run in ("ranks", "zero3"):
        yield Entry(f"term.launcher.{run}", launcher, run, to("launcher", TERM), saved, ANY)
        yield Entry(f"term.rank.{run}", asked, run, to("rank", TERM), saved, ANY)
    yield Entry("usr1.rank.ranks", asked, "ranks", to("rank", USR1), saved, ANY)
    by_hand = Outcome(stops | {-2: ""}, grace_s=40)
    yield Entry("int.launcher.ranks", launcher, "ranks", to_all(INT), by_hand, ANY)
    yield Entry("segv.rank.ranks", killed, "ranks", to("rank", SEGV), lost, ANY)
    group = "Ranks: rank stopped for up to 3 s"
    yield Entry("stop.rank.ranks", group, "ranks", stopped("rank", 0.5, 3.0), at=ANY)
    group, outcome = "Ranks: `kill -9` of torchrun", Outcome(codes(-9), grace_s=60)
    yield Entry("kill.launcher.ranks", group, "ranks", to("launcher", KILL), outcome, ANY)
    group = "Ranks: `kill -9` of a generator process of a rank"
    yield Entry("kill.generator.ranks_lag", group, "ranks_lag", to("generator", KILL), at=ANY)


def sweeps() -> Iterator[Entry]:
    """Yield the entries of signals to sweeps and their jobs."""
    at = Moment("row", (1, 3, 6, 8), spread_s=0.2)
    for run in ("sweep", "sweep_local", "sweep_joblib"):
        new = run == "sweep_joblib"  # its processes are not forked from a server of tests/forks.py
        for number, fault, allowed in (
            (KILL, "`kill -9` of the sweep's process", codes(-9)),
            (TERM, "SIGTERM to the sweep's process", codes(0, 75)),
            (INT, "Ctrl-C", codes(0, 130)),
        ):
            name, outcome = f"{NAMES[number]}.{run}", Outcome(allowed, grace_s=30)
            yield Entry(name, f"Sweeps: {fault}", run, ending(number), outcome, at, fresh=new)
    for run in ("sweep_local", "sweep_joblib"):
        at, outcome = (
            Moment("row", (1, 3), spread_s=0.2),
            Outcome(codes(0, 1), grace_s=30),
        )  # 0: after its run
        yield Entry(f"kill.job.{run}", "Sweeps: `kill -9` of a job", run, to("job", KILL), outcome, at)


def commands() -> Iterator[Entry]:
    """Yield the entries of signals to other commands."""
    moments = {
        "pipeline": Moment(LOAD, spread_s=4.0),
        "evaluate": Moment(START, spread_s=2.0),
        "relabel": Moment(START, spread_s=1.5),
        "extend": Moment("wait", (1, 2, 3), spread_s=0.2),
    }
    for run, at in moments.items():
        for number in (KILL, TERM, INT):
            group = f"Commands: {SHOWN[number]} of `rlhf.pipeline`, `evaluate`, `relabel` or `extend`"
            outcome = Outcome(AFTER[number] | ({-number: ""} if at.phase == START else {}))
            yield Entry(f"{NAMES[number]}.{run}", group, run, ending(number), outcome, at)
    group, act = "Commands: `rlhf.pipeline` stopped for up to 3 s", stopped("trainer", 0.5, 3.0)
    yield Entry("stop.pipeline", group, "pipeline", act, at=moments["pipeline"])


def vllm() -> Iterator[Entry]:
    """Yield the entries of signals to runs with vLLM."""
    group = "vLLM: signals to the trainer and to the vLLM process"
    for number, role in ((KILL, "trainer"), (TERM, "trainer"), (KILL, "generator"), (INT, "trainer")):
        act = ending(number) if role == "trainer" else to(role, number)
        outcome = Outcome(AFTER[number] if role == "trainer" else codes(0), grace_s=40)
        yield Entry(f"{NAMES[number]}.{role}.vllm", group, "vllm", act, outcome, ANY)
    at, outcome = Moment(LOAD, spread_s=12.0), Outcome(codes(-9), grace_s=40)
    yield Entry("kill.trainer.vllm.start", group, "vllm", to("trainer", KILL), outcome, at)
    yield Entry("stop.generator.vllm", group, "vllm", stopped("generator", 0.5, 4.0), at=ANY)


ENTRIES = (*trainer(), *workers(), *ranks(), *sweeps(), *commands(), *vllm())
