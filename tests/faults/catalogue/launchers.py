"""Signals to ranks, sweeps, vLLM and the commands other than `rlhf.train`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.catalogue.signals import (
    AFTER,
    ANY,
    INT,
    KILL,
    MOMENTS,
    NAMES,
    SEGV,
    SHOWN,
    TERM,
    USR1,
    stopped,
    to,
    to_all,
)
from tests.faults.entry import LOAD, START, Entry, Moment, Outcome, codes


def ranks() -> Iterator[Entry]:
    """Yield the entries of signals to ranks and to torchrun."""
    stops = codes(1, -15, 75, 143, 130)  # torchrun has exit codes of its own
    for run in ("ranks", "ranks_lag", "zero2", "zero3"):
        needs = "deepspeed" if run.startswith("zero") else ""
        for name, moment in (("sampling", ANY), ("checkpoint", MOMENTS["checkpoint"])):
            yield Entry(
                f"kill.rank.{run}.{name}",
                "Ranks: `kill -9` or SIGSEGV of a rank",
                run,
                to("rank", KILL),
                Outcome(codes(1), grace_s=40),
                at=moment,
                needs=needs,
            )
    for run in ("ranks", "zero3"):
        needs = "deepspeed" if run.startswith("zero") else ""
        yield Entry(
            f"term.launcher.{run}",
            "Ranks: SIGTERM or Ctrl-C to torchrun",
            run,
            to("launcher", TERM),
            Outcome({**stops, 0: ""}, traceback=False, grace_s=40),
            at=ANY,
            needs=needs,
        )
        yield Entry(
            f"term.rank.{run}",
            "Ranks: SIGTERM or SIGUSR1 to a rank: all ranks save and stop",
            run,
            to("rank", TERM),
            Outcome({**stops, 0: ""}, grace_s=40),
            at=ANY,
            needs=needs,
        )
    yield Entry(
        "usr1.rank.ranks",
        "Ranks: SIGTERM or SIGUSR1 to a rank: all ranks save and stop",
        "ranks",
        to("rank", USR1),
        Outcome({**stops, 0: ""}, grace_s=40),
        at=ANY,
    )
    yield Entry(
        "int.launcher.ranks",
        "Ranks: SIGTERM or Ctrl-C to torchrun",
        "ranks",
        to_all(INT),
        Outcome({**stops, -2: "", 0: ""}, grace_s=40),
        at=ANY,
    )
    yield Entry(
        "segv.rank.ranks",
        "Ranks: `kill -9` or SIGSEGV of a rank",
        "ranks",
        to("rank", SEGV),
        Outcome(codes(1), grace_s=40),
        at=ANY,
    )
    yield Entry(
        "stop.rank.ranks",
        "Ranks: rank stopped for up to 3 s",
        "ranks",
        stopped("rank", 0.5, 3.0),
        Outcome(codes(0)),
        at=ANY,
    )
    yield Entry(
        "kill.launcher.ranks",
        "Ranks: `kill -9` of torchrun",
        "ranks",
        to("launcher", KILL),
        Outcome(codes(-9), grace_s=60),
        at=ANY,
    )
    yield Entry(
        "kill.generator.ranks_lag",
        "Ranks: `kill -9` of a generator process of a rank",
        "ranks_lag",
        to("generator", KILL),
        Outcome(codes(0)),
        at=ANY,
    )


def sweeps() -> Iterator[Entry]:
    """Yield the entries of signals to sweeps and their jobs."""
    for run in ("sweep", "sweep_local", "sweep_joblib"):
        yield Entry(
            f"kill.{run}",
            "Sweeps: `kill -9` of the sweep's process",
            run,
            to("trainer", KILL),
            Outcome(codes(-9), grace_s=30),
            at=Moment("row", (1, 3, 6, 8), spread_s=0.2),
            fresh=run == "sweep_joblib",  # its processes are not forked from a server of tests/forks.py
        )
        yield Entry(
            f"term.{run}",
            "Sweeps: SIGTERM to the sweep's process",
            run,
            to("trainer", TERM),
            Outcome(codes(0, 75), grace_s=30),
            at=Moment("row", (1, 3, 6, 8), spread_s=0.2),
            fresh=run == "sweep_joblib",  # its processes are not forked from a server of tests/forks.py
        )
        yield Entry(
            f"int.{run}",
            "Sweeps: Ctrl-C",
            run,
            to_all(INT),
            Outcome(codes(0, 130), grace_s=30),
            at=Moment("row", (1, 3, 6, 8), spread_s=0.2),
            fresh=run == "sweep_joblib",  # its processes are not forked from a server of tests/forks.py
        )
    for run in ("sweep_local", "sweep_joblib"):
        yield Entry(
            f"kill.job.{run}",
            "Sweeps: `kill -9` of a job",
            run,
            to("job", KILL),
            Outcome(codes(0, 1), grace_s=30),  # 0: the job had finished its run
            at=Moment("row", (1, 3), spread_s=0.2),
        )


def commands() -> Iterator[Entry]:
    """Yield the entries of signals to other commands."""
    moments = {
        "pipeline": Moment(LOAD, spread_s=4.0),
        "evaluate": Moment(START, spread_s=2.0),
        "relabel": Moment(START, spread_s=1.5),
        "extend": Moment("wait", (1, 2, 3), spread_s=0.2),
    }
    for run, moment in moments.items():
        for number in (KILL, TERM, INT):
            early = {-number: ""} if moment.phase == START else {}
            yield Entry(
                f"{NAMES[number]}.{run}",
                f"Commands: {SHOWN[number]} of `rlhf.pipeline`, `evaluate`, `relabel` or `extend`",
                run,
                to("trainer", number) if number != INT else to_all(INT),
                Outcome(AFTER[number] | early),
                at=moment,
            )
    yield Entry(
        "stop.pipeline",
        "Commands: `rlhf.pipeline` stopped for up to 3 s",
        "pipeline",
        stopped("trainer", 0.5, 3.0),
        Outcome(codes(0)),
        at=moments["pipeline"],
    )


def vllm() -> Iterator[Entry]:
    """Yield the entries of signals to runs with vLLM."""
    for number, role in ((KILL, "trainer"), (TERM, "trainer"), (KILL, "generator"), (INT, "trainer")):
        yield Entry(
            f"{NAMES[number]}.{role}.vllm",
            "vLLM: signals to the trainer and to the vLLM process",
            "vllm",
            to(role, number) if number != INT else to_all(INT),
            Outcome(AFTER[number] if role == "trainer" else codes(0), grace_s=40),
            at=ANY,
            needs="vllm",
        )
    yield Entry(
        "kill.trainer.vllm.start",
        "vLLM: signals to the trainer and to the vLLM process",
        "vllm",
        to("trainer", KILL),
        Outcome(codes(-9), grace_s=40),
        at=Moment(LOAD, spread_s=12.0),
        needs="vllm",
    )
    yield Entry(
        "stop.generator.vllm",
        "vLLM: signals to the trainer and to the vLLM process",
        "vllm",
        stopped("generator", 0.5, 4.0),
        Outcome(codes(0)),
        at=ANY,
        needs="vllm",
    )


ENTRIES = (*ranks(), *sweeps(), *commands(), *vllm())
