"""One attempt at a run of a study, in a process that the worker forks.

The process is that of an ordinary run (`rlhf.stages.run`), without the seconds of an import. The worker holds
the lock of the run folder.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf.checks.check import checked
from rlhf.checks.job import check_job
from rlhf.config.cores import set_environment
from rlhf.config.root import Config
from rlhf.core import files
from rlhf.core.errors import Interrupted, RunError
from rlhf.core.version import RESULTS
from rlhf.processes.signals import interruptible
from rlhf.report.runs import Status, read_run
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK
from rlhf.study.collection import FAILURES, ROW
from rlhf.study.identity import inputs, stale
from rlhf.study.planning import Plan, Planned
from rlhf.study.recording import measured, model_digests
from rlhf.study.rows import FAILED, Row, read_rows, write_rows
from rlhf.study.spec import Spec

ATTEMPTS = 2  # errors after which a run has failed
KILLS = 5  # attempts without a new update that were killed, after which a run has failed
_POLL_S = 0.5  # seconds between checks whether the worker has ended
_WAIT_S = 0.1
_IDENTITY = "identity.json"  # of a run folder: what its files were made of
OUTPUT = "output.log"  # of a run folder: the terminal output of the run


def is_done(spec: Spec, planned: Planned) -> bool:
    """Return whether the run folder has a row that is not stale."""
    rows = read_rows(planned.folder / ROW)
    return bool(rows) and rows[0].run == planned.digest and not stale(rows[0], planned.inputs, spec.accept)


def begin(planned: Planned) -> None:
    """Remove the files of another identity from the run folder, such as those of changed data."""
    folder, identity = planned.folder, planned.folder / _IDENTITY
    wanted = {"run": planned.digest, "inputs": dict(planned.inputs), "results": RESULTS}
    if identity.exists() and files.read_json(identity, files.delete_command(folder)) == wanted:
        return
    for path in folder.iterdir():
        if path.name != LOCK:
            files.discard(path)
    files.write_json(identity, wanted)


def failures(folder: Path) -> list[str]:
    """Return the errors of earlier attempts at a run."""
    return [str(each["error"]) for each in files.read_lines(folder / FAILURES, ["error"])]


def forked(
    folder: Path, work: Callable[[], None], failed: Callable[[str], None] | None = None, niceness: int = 0
) -> int:
    """Call a function in a process that is forked for it, and return the process id.

    The exit code of the process is 0, 75 after a signal, and 1 after an error. The process stops once this
    one has ended.

    Args:
        folder: the folder of `OUTPUT`, to which the output of the process goes.
        work: the function.
        failed: called in the process with the first line of an error.
        niceness: added to the niceness of the process.
    """
    parent = os.getpid()
    if process := os.fork():
        return process
    code = 1
    try:
        with (folder / OUTPUT).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        os.nice(niceness)
        work()
        code = 0
    except (Interrupted, KeyboardInterrupt):
        code = os.EX_TEMPFAIL
    except BaseException as error:
        traceback.print_exc()
        if failed and os.getppid() == parent:  # else another worker may have the folder
            failed(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        leave(code)
    raise AssertionError


def wait_for(process: int, parent: int | None = None) -> int:
    """Wait for a process that `forked` started; if an exception comes, let it write its checkpoint first.

    Args:
        process: the process.
        parent: the parent of this process; if it has ended, this process asks itself to stop.

    Returns:
        The exit code, or minus the signal that killed the process.
    """
    try:
        while True:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if parent is not None and os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_WAIT_S)
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
        raise


def fork(plan: Plan, planned: Planned, niceness: int = 0) -> int:
    """Start an attempt at a run, and return its process id; the process writes the row or an error."""
    cfg = plan.configs.config(planned.run)
    return forked(
        planned.folder,
        lambda: write_rows(planned.folder / ROW, [carry_out(plan.spec, planned, cfg)]),
        partial(note_failure, planned),
        niceness,
    )


def note_failure(planned: Planned, error: str) -> None:
    """Record the error of an attempt; after the last attempt, write the row of a failed run."""
    files.append(planned.folder / FAILURES, [{"error": error}])
    found = failures(planned.folder)
    killed = [each for each in found if each == error and each.startswith("killed")]
    others = [each for each in found if not each.startswith("killed")]
    if len(killed) >= KILLS or len(others) >= ATTEMPTS:
        row = row_of(planned, status=FAILED, error=error, metric="")
        write_rows(planned.folder / ROW, [row])


def carry_out(spec: Spec, planned: Planned, cfg: Config) -> Row:
    """Carry out or resume a run in this process, and return its row.

    Raises:
        UserError, RunError: the run failed.
        Interrupted: a signal asked to stop; the next attempt resumes the run.
    """
    set_environment()
    from rlhf.stages.prerequisites import complete, prerequisites
    from rlhf.stages.run import run as train

    folder, task, error = RunFolder(planned.folder), spec.tasks[planned.run.cell.task], None
    with interruptible():
        complete(checked(cfg), train)
        _, stages = prerequisites(cfg, train)
        began, used_s = time.monotonic(), cpu_s()
        before = (folder.read_state() or {}).get("update", 0) if folder.last_checkpoint() else 0
        try:
            train(cfg, folder, check=False, claim=nullcontext, hooks=check_job(cfg))
        except RunError as reason:
            if read_run(folder.path).status is not Status.failed:  # not a loss that is not finite
                raise
            error = str(reason).partition(";")[0]
    taken, used_s = time.monotonic() - began, cpu_s() - used_s
    updates = (folder.read_state() or {}).get("update", 0)
    sessions = updates / (updates - before) if updates > before else 1.0  # those before took as long
    names = [each.quantity for each in (*spec.tables, *spec.figures)]
    row = row_of(
        replace(planned, inputs=inputs(cfg)),
        **measured(folder.path, task.metric or cfg.metric, names),
        error=error,
        cpu_s=round(used_s * sessions, 2),
        gpu_s=round(taken * sessions, 2) * len(read_run(folder.path).environment.get("devices", [])),
        models=model_digests({stage.name: stage.folder for stage in stages}),
    )
    if "models" not in spec.keep:
        for path in (folder.model, folder.adapter, *folder.path.glob("checkpoint-*")):
            files.discard(path)
    return row


def row_of(planned: Planned, **fields: Any) -> Row:
    """Return the row of a run; fields that are not given are empty."""
    run = planned.run
    empty: dict[str, Any] = {name: {} for name in ("metrics", "evaluations", "means", "models")}
    empty |= {"prompts": 0, "bits": None, "cpu_s": 0.0, "gpu_s": 0.0, "memory_gb": None}
    return Row(
        run=planned.digest,
        inputs=dict(planned.inputs),
        results=RESULTS,
        task=run.cell.task,
        method=run.cell.method,
        levels=dict(run.cell.levels),
        seed=run.seed,
        part=run.part,
        tuned=dict(run.tuned),
        **{**empty, "machine": "", "versions": "", **fields},
    )


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _end_with(parent: int) -> None:
    """Ask this process to stop once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process without the clean-up of its parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
