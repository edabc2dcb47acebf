"""Signals in a sweep whose jobs run in child processes (joblib): the jobs stop first, then the sweep.

    process of the sweep   a signal is passed on to the processes for jobs, and the sweep waits for them
    process for jobs       a running job writes its checkpoint; a job that has not begun is refused

If the process of the sweep is killed, a process for jobs does the same and ends.

This module imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
from hydra.plugins.launcher import Launcher

from rlhf.core.errors import Interrupted
from rlhf.launch.hydra_internals import joblib_settings
from rlhf.processes import signals

_POLL_S = 0.5  # seconds between checks whether the process of the sweep has ended

process = ExitStack()  # in a process for jobs: its signal handlers, from its first job until its end
serving = False  # whether this process is a process for jobs
_busy = threading.Lock()  # locked while a job runs


@contextmanager
def waiting_for_jobs(launcher: Launcher, jobs: int) -> Iterator[None]:
    """After a signal during the block, which launches jobs in child processes, wait until the jobs end.

    The block has no effect with a launcher other than joblib.

    Args:
        launcher: the launcher of the sweep.
        jobs: number of jobs; no more processes are started, because a signal ends a process without a job.

    Raises:
        Interrupted: a signal was received.
    """
    settings, interruption = joblib_settings(launcher), signals.active
    if settings is None or interruption is None:
        yield
        return
    from joblib import effective_n_jobs

    settings["n_jobs"] = min(effective_n_jobs(settings["n_jobs"]), jobs)
    interruption.defer()
    signals.call_at_signal(_pass_on)
    try:
        yield
    except KeyboardInterrupt:  # from a process for jobs
        if interruption.received is None:
            raise
    finally:
        signals.do_not_call_at_signal(_pass_on)
        interruption.deferred = False
    if interruption.received is not None:
        raise Interrupted(
            f"interrupted by {interruption.cause}; each run wrote a checkpoint if training had begun; the "
            "same command resumes them",
            interruption.received,
        )


def _pass_on() -> None:
    """Send SIGTERM to the child processes in this process group; after Ctrl-C, it is not a second signal."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(child.pid) == os.getpgrp():
                child.send_signal(signal.SIGTERM)


@contextmanager
def job_in_child() -> Iterator[None]:
    """Carry out a job in a process for jobs, which keeps its signal handlers between jobs.

    Raises:
        Interrupted: a signal was received, also before this job.
    """
    global serving
    if not serving:
        serving = True
        process.enter_context(signals.interruptible())
        threading.Thread(target=_end_with_sweep, args=(os.getppid(),), daemon=True).start()
    assert signals.active is not None, "joblib runs jobs in the main thread"
    signals.active.check()
    with _busy:
        try:
            yield
        finally:
            signals.active.deferred = True


def _end_with_sweep(sweep: int) -> None:
    """Wait until the process `sweep`, the parent, has ended; let a running job stop; end this process."""
    while os.getppid() == sweep:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    with _busy:
        os._exit(os.EX_TEMPFAIL)
