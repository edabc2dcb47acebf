"""A job of a sweep, in the process that runs it: that of the sweep, one of joblib, or one of submitit.

A process of joblib runs several jobs. After a signal, a running job writes its checkpoint, and a job that has
not begun is refused. If the process of the sweep is killed, a process of joblib does the same and ends.

This module imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlhf.checks.check import overrides_of
from rlhf.core import stages
from rlhf.core.console import console
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.launched import world_size
from rlhf.experiment import Experiment
from rlhf.launch import search, slurm, sweep
from rlhf.launch.jobs import announce
from rlhf.processes import signals
from rlhf.runs.lock import waiting_claim

_POLL_S = 0.5  # seconds between checks whether the process of the sweep has ended

_handlers = ExitStack()  # in a process of joblib: its signal handlers, from its first job until its end
_busy = threading.Lock()  # locked while a job runs in a process of joblib


def run_job(config: DictConfig, folder: Path) -> float | None:
    """Run a job, and return the value of the metric that a sweeper optimises.

    Args:
        config: the config of the job.
        folder: the run folder.

    Raises:
        UserError, RunError: the job failed, or a signal stopped the process of the job.
        Interrupted: a signal stopped the process of the sweep, which runs the job.
    """
    of_joblib = sweep.current is None and "joblib" in HydraConfig.get().launcher._target_
    try:
        with _process_of_joblib() if of_joblib else nullcontext():
            return _execute(config, folder)
    except Interrupted as reason:
        if sweep.current is not None:
            raise
        if not of_joblib:
            slurm.requeue(reason)
        raise RunError(str(reason)) from None
    except (UserError, RunError):
        raise
    except Exception:
        traceback.print_exc()  # the exception may arrive in the process of the sweep without its traceback
        raise


def _execute(config: DictConfig, folder: Path) -> float | None:
    job = HydraConfig.get()
    overrides = overrides_of(job.overrides)
    experiment = Experiment.composed(config, overrides, folder)
    experiment.validate()  # perhaps on another machine than that of the sweep
    begin_job(job.job.num, overrides)
    metric = experiment.config.metric
    if (finished := experiment.prepare(wait=world_size() == 1)) is not None:
        announce(experiment.files, finished, metric)
        return finished["result"].get(metric)
    experiment.hooks = search.pruning_hooks(job.sweeper, Path(job.sweep.dir), overrides, metric)
    return experiment.execute(claim=waiting_claim)


def begin_job(number: int, overrides: list[str]) -> None:
    """Print the title of a job. In a process for jobs, later titles begin with the number of the job.

    Args:
        number: number of the job among the jobs that run, from 0.
        overrides: overrides of the job.
    """
    known = None if sweep.current is None else sweep.current.title(overrides)
    console.print(known or f"job {number + 1}: {' '.join(overrides)}", markup=False, style="bold")
    stages.job = f"job {number + 1} " if sweep.current is None else ""


@contextmanager
def _process_of_joblib() -> Iterator[None]:
    """Run a job in a process of joblib, which keeps its signal handlers between jobs.

    Raises:
        Interrupted: a signal was received, also before this job.
    """
    if signals.active is None:
        _handlers.enter_context(signals.interruptible())
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
