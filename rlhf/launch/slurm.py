"""SLURM tasks as ranks, and requeueing of SLURM jobs that were stopped.

The same functions serve jobs that submitit runs on this machine (`hydra/launcher=local`). This module imports
no torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.core.errors import Interrupted

PORTS = range(16384, 32768)  # below the ports that operating systems assign automatically


def name_rank() -> None:
    """Set RANK, WORLD_SIZE and the related variables of torchrun, if this process is one of several tasks.

    If RANK is already set, for example by torchrun, no variable is changed. Existing values of MASTER_ADDR
    and MASTER_PORT are never changed.
    """
    if "RANK" not in os.environ:
        given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        os.environ.update(rank_environment(os.environ) | given)


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task; empty if the process is the only task.

    The function reads SLURM's variables of the step (`SLURM_STEP_...`), which exist only in processes that
    srun started. Variables of the job also exist in the batch script, which is a single process.
    """
    if environ.get("SUBMITIT_EXECUTOR") == "local":
        tasks = int(environ["SUBMITIT_LOCAL_NTASKS"])
        rank = local = environ["SUBMITIT_LOCAL_GLOBALID"]
        on_this_machine, host, job = tasks, "127.0.0.1", int(environ["SUBMITIT_LOCAL_JOB_ID"])
    else:
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks == 1:
            return {}
        rank, local = environ["SLURM_PROCID"], environ["SLURM_LOCALID"]
        on_this_machine = tasks_of_node(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ["SLURM_NODEID"]))
        host = first_host(environ["SLURM_STEP_NODELIST"])
        job = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
    if tasks == 1:
        return {}
    if environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():
        local = "0"  # each task sees one GPU (--gpus-per-task), and LOCAL_RANK indexes the visible GPUs
    return {
        "RANK": rank,
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(on_this_machine),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(PORTS[job % len(PORTS)]),
    }


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: `rack[1-2]node[08-10,12],login` -> `rack1node08`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def tasks_of_node(shorthand: str, node: int) -> int:
    """Return the number of tasks of node number `node`; `shorthand` is SLURM's `4(x2),3` for 4, 4, 3."""
    counts: list[int] = []
    for part in shorthand.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or "1")
    return counts[node]


def requeue(reason: Interrupted) -> None:
    """Requeue this submitit job after the checkpoint of a stopped run is written.

    The function calls submitit's handler of SIGUSR2, which counts the sessions that reached the time limit
    (`hydra.launcher.max_num_timeout`) and asks SLURM to requeue the job. The function returns if the job must
    not be requeued.

    Args:
        reason: the exception that stopped the run.

    Raises:
        SystemExit: the job is requeued.
        submitit's UncompletedJobError: the job reached its time limit too often.
    """
    submitit_handler = signal.getsignal(signal.SIGUSR2)
    if not callable(submitit_handler) or not _was_preempted(reason):
        return
    submitit_handler(signal.SIGUSR2, None)  # ends the process of the first rank
    raise SystemExit(os.EX_TEMPFAIL)


def _was_preempted(reason: Interrupted) -> bool:
    """Return whether a job was stopped by its time limit or by another job, not cancelled by a user.

    SLURM would requeue a cancelled job, too, so the function asks SLURM for the reason.

    Args:
        reason: the exception that stopped the run.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        return reason.received is not signal.SIGTERM
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in os.environ:  # the id of the last element is that of the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    answer = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    state, _, why = answer.stdout.strip().partition(" ")
    return state == "RUNNING" or why in ("TimeLimit", "Preempted")
