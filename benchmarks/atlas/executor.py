"""Execution of runs in the background: worker processes with one thread and low priority, and progress.

A worker process imports torch once and carries out many runs. The file of results is written after every run.
If the command is interrupted, each worker saves a checkpoint, and the same command resumes these runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from benchmarks.atlas import record
from benchmarks.atlas.design import Design, Run
from benchmarks.atlas.plan import expected_s
from benchmarks.atlas.record import FAILED, Row

NICENESS = 10
RUNS_PER_PROCESS = 50  # a process ends after so many runs, which bounds its memory
STOP_S = 120.0  # seconds that a worker may take to save a checkpoint after a signal
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class Worker:
    """A process that carries out runs, one after the other.

    Args:
        design: the study.
        number: number of the worker, in the name of its log file.
    """

    def __init__(self, design: Design, number: int) -> None:
        context = get_context("spawn")
        self.design = design
        self.number = number
        self.left = RUNS_PER_PROCESS
        self.run: Run | None = None
        self.pipe, other = context.Pipe()
        log = design.outputs / f"worker-{number}.log"
        self.process = context.Process(target=serve, args=(design, other, log), daemon=True)
        self.process.start()
        other.close()

    def send(self, run: Run) -> None:
        """Start a run."""
        self.run, self.left = run, self.left - 1
        self.pipe.send(run)

    def receive(self) -> Row:
        """Return the row of the run; if the process ended, a row that reports the failure."""
        assert self.run is not None
        try:
            found: Row = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.left = 0
            reason = f"the process ended with exit code {self.process.exitcode}"
            return record.row(self.design, self.run, FAILED, (), error=reason)
        return found

    def stop(self) -> None:
        """Wait until the process ends: at once if it waits for a run, else after its checkpoint."""
        self.pipe.close()
        self.process.join(STOP_S)


def serve(design: Design, pipe: Connection, log: Path) -> None:
    """Carry out the runs that arrive, in a worker process. The output of the runs goes to a log file."""
    os.nice(NICENESS)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from benchmarks.atlas.worker import carry_out

    while True:
        try:
            run = pipe.recv()
        except EOFError:
            return
        pipe.send(carry_out(design, run))


def outcomes(design: Design, runs: Sequence[Run], workers: int) -> Iterator[Row]:
    """Carry out runs in worker processes, and yield their rows in the order in which they end."""
    waiting, idle, busy = deque(runs), [], {}  # type: deque[Run], list[Worker], dict[Any, Worker]
    numbers = list(range(workers))
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else Worker(design, numbers.pop(0))
                worker.send(waiting.popleft())
                busy[worker.pipe] = worker
            for pipe in wait(list(busy)):
                worker = busy.pop(pipe)
                yield worker.receive()
                if worker.left:
                    idle.append(worker)
                else:
                    worker.stop()
                    numbers.append(worker.number)
    finally:
        for worker in busy.values():
            worker.process.terminate()  # all workers save their checkpoints at the same time
        for worker in [*busy.values(), *idle]:
            worker.stop()


def execute(design: Design, runs: Sequence[Run], rows: dict[str, Row], workers: int) -> None:
    """Carry out runs; add each row to `rows` and to the file of results, and print progress.

    Raises:
        SystemExit: after SIGTERM, with exit code 143.
    """
    os.environ.update(ENVIRONMENT)
    design.outputs.mkdir(parents=True, exist_ok=True)
    previous = signal.signal(signal.SIGTERM, terminate)
    began, used_s = time.monotonic(), 0.0
    todo = {design.key(run): run for run in runs}
    try:
        for number, row in enumerate(outcomes(design, runs, workers), start=1):
            del todo[row.run]
            rows[row.run] = row
            record.write(design.results, rows.values())
            used_s += row.cpu_s
            left_s = expected_s(design, list(todo.values()), list(rows.values()))
            pace = (time.monotonic() - began) / used_s if used_s else 1 / workers
            print(f"[{number}/{len(runs)}] {told(design, row)}; left: {left(left_s, pace)}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)


def terminate(number: int, frame: object) -> NoReturn:
    """End the command after SIGTERM; the workers save checkpoints."""
    raise SystemExit(128 + number)


def told(design: Design, row: Row) -> str:
    """Return a run and its result as text."""
    setting = f"{row.task} {row.method} lag {row.lag} N {row.minibatches} lr {row.rate:g} seed {row.seed}"
    label = design.tasks[row.task].label
    values = f"{label} {row.result:.3f}" if row.status == record.FINISHED else f"{row.status}: {row.error}"
    return f"{setting}: {values}, {row.cpu_s:.0f} CPU-s"


def left(cpu_s: float, pace: float) -> str:
    """Return the CPU time that is left, and the wall time at `pace` (wall seconds per CPU second)."""
    return f"{cpu_s / 3600:.1f} CPU-hours, {cpu_s * pace / 3600:.1f} hours"
