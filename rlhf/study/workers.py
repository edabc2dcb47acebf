"""Workers of a study: equal processes without a head, each of which takes the next missing run.

    worker:  the first run without a row whose folder is not locked -> fork an attempt -> the next run
    command: starts workers, prints finished runs, collects rows

The lock of a run folder (`rlhf.runs.lock_file`) divides the work, so workers of several commands and hosts
share a study on one file system. A worker that is killed leaves a run that another one resumes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.config.cores import set_environment
from rlhf.core.errors import RunError
from rlhf.core.output import print_error
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK
from rlhf.runs.lock_file import LockFile
from rlhf.study import attempt
from rlhf.study.collection import Collection
from rlhf.study.planning import DONE, Plan, Planned

SAME = 3  # equal failures in a row that stop a worker
STOPPED = 3  # exit code of a worker after that
_IDLE_S = 2.0  # seconds between two looks for work, while other workers have all runs


class Worker:
    """A process that carries out runs, one after the other.

    Args:
        plan: the study, with any rows.
        niceness: niceness of the runs.
    """

    def __init__(self, plan: Plan, niceness: int = 0) -> None:
        self.plan, self.niceness = plan, niceness
        self.collection = Collection(plan.spec)
        self.locks: dict[Path, LockFile] = {}  # locks of others: how long their owners have been silent
        self.errors: list[str] = []  # of the last attempts; a success clears them
        self.parent = os.getppid()

    def work(self) -> None:
        """Carry out runs until no run is missing.

        Raises:
            RunError: `SAME` attempts in a row failed with the same error.
            Interrupted, KeyboardInterrupt: a signal asked to stop; the attempt has written its checkpoint.
        """
        while missing := self.missing():
            if not any(self.take(each) for each in missing):
                time.sleep(_IDLE_S)

    def missing(self) -> list[Planned]:
        """Return the runs without a row; those that failed before come last."""
        self.plan = self.plan.after(self.collection.rows())
        runs = [each for each in self.plan.runs if each.state != DONE]
        return sorted(runs, key=lambda each: bool(attempt.failures(each.folder)))

    def take(self, planned: Planned) -> bool:
        """Carry out a run; return False if another worker has it."""
        lock = self.locks.pop(planned.folder, None) or LockFile(planned.folder / LOCK, planned.folder)
        if not lock.acquire():
            self.locks[planned.folder] = lock
            return False
        lock.hold()
        try:
            if not attempt.is_done(self.plan.spec, planned):
                attempt.begin(planned)
                self.carry_out(planned)
        finally:
            lock.release()
        return True

    def carry_out(self, planned: Planned) -> None:
        """Fork an attempt, and wait for it."""
        before = len(attempt.failures(planned.folder))
        process = attempt.fork(self.plan, planned, self.niceness)
        code = attempt.wait_for(process, self.parent)
        if code < 0:  # killed by a signal; the next attempt resumes from the checkpoint
            state = RunFolder(planned.folder).read_state() or {}
            text = f"killed by signal {-code} after update {state.get('update', 0)}"
            attempt.note_failure(planned, text)
            if not attempt.is_done(self.plan.spec, planned):
                return  # kills come from outside, so equal ones of several runs say nothing
        new = attempt.failures(planned.folder)[before:]
        self.errors = [*self.errors, *(each.replace(planned.folder.name, "<run>") for each in new)]
        if not new:
            self.errors.clear()
        elif len(self.errors) >= SAME and len({*self.errors[-SAME:]}) == 1:
            raise RunError(
                f"{SAME} runs in a row failed with the same error ({self.errors[-1]}), the last one in "
                f"{planned.folder}; remove the cause, then the same command resumes the study"
            )


@contextmanager
def started(plan: Plan, count: int, niceness: int) -> Iterator[set[int]]:
    """Start workers for the block, and yield their process ids; at its end, stop those that still work."""
    set_environment()
    import rlhf.stages.run  # noqa: F401  the workers and their attempts share the imported modules

    processes: set[int] = set()
    try:
        for _ in range(count):
            if not (process := os.fork()):
                _work(Worker(plan, niceness))
            processes.add(process)
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        for process in processes:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def _work(worker: Worker) -> None:
    """Let a worker work in this process, which was forked for that, and end the process."""
    code = 0
    try:
        with interruptible():
            worker.work()
    except RunError as error:
        print_error(f"error: {error}")
        code = STOPPED
    except BaseException as error:
        code = 1
        if isinstance(error, Exception):
            print_error(f"error in a worker: {type(error).__name__}: {error}")
    finally:
        attempt.leave(code)


def ended(processes: set[int]) -> Iterator[int]:
    """Yield the exit codes of workers that have ended, and remove these workers."""
    for process in list(processes):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            processes.remove(process)
            yield os.waitstatus_to_exitcode(status)
