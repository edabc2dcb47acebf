"""What SLURM has to do with a run: its tasks are ranks, and a job that was stopped starts again later.

The same for jobs that submitit runs on this machine (`hydra/launcher=local`), which have the same parts.
Imports no torch.
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


PORTS = range(16384, 32768)  # below those that systems hand out by themselves


def name_rank() -> None:
    """Say in the environment which rank this process is, as torchrun does, where it is one of a job's tasks.

    torchrun and whoever else has named it already is left alone, and so are MASTER_ADDR and MASTER_PORT.
    """
    if "RANK" not in os.environ:
        os.environ.update({**rank_environment(os.environ), **user_given(os.environ)})


def user_given(environ: Mapping[str, str]) -> dict[str, str]:
    """Where to meet, as it was set by hand."""
    return {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, for one of several tasks; empty for a process that is alone.

    The variables of the step (`SLURM_STEP_...`) are there only in what srun started. Those of the job are in
    its batch script too, which is one process however many tasks the job has.
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
        local = "0"  # each task sees one GPU, its own (--gpus-per-task), and LOCAL_RANK counts what it sees
    return {
        "RANK": rank,
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(on_this_machine),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(PORTS[job % len(PORTS)]),
    }


def first_host(nodes: str) -> str:
    """The first host of SLURM's shorthand: `rack[1-2]node[08-10,12],login` -> `rack1node08`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def tasks_of_node(shorthand: str, node: int) -> int:
    """How many tasks the node `node` has, of SLURM's shorthand: `4(x2),3` -> 4, 4, 3."""
    counts: list[int] = []
    for part in shorthand.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or "1")
    return counts[node]


def requeue(reason: Interrupted) -> None:
    """Have a job of submitit start again later, once it was stopped at a safe point.

    What submitit would do at SIGUSR2 it does here, when the checkpoint is written: it counts the time limits
    that were hit (`hydra.launcher.max_num_timeout`) and asks SLURM to requeue the job. Returns where the job
    is not to start again.

    Raises:
        SystemExit: the job will start again.
        submitit's UncompletedJobError: its time limit was hit too often.
    """
    submitits = signal.getsignal(signal.SIGUSR2)
    if not callable(submitits) or not to_be_gone_on_with(reason):
        return
    submitits(signal.SIGUSR2, None)  # ends the process of the first rank
    raise SystemExit(os.EX_TEMPFAIL)


def to_be_gone_on_with(reason: Interrupted) -> bool:
    """Whether a job was stopped for its time limit or for another job, not because somebody cancelled it.

    SLURM would also requeue a job that is being cancelled.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        return reason.received is not signal.SIGTERM
    job = os.environ["SLURM_JOB_ID"]
    asked = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    state, _, why = asked.stdout.strip().partition(" ")
    return state == "RUNNING" or why in ("TimeLimit", "Preempted")
