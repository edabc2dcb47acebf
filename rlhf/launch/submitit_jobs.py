"""Sweep jobs in their own processes, by submitit: SLURM jobs, or processes on this machine.

Differences from Hydra's submitit launcher:
- If a job dies, this launcher still waits for the other jobs.
- If a job is already in SLURM's queue, this launcher waits for this job instead of submitting a new job.
- Ctrl-C cancels the jobs.

Jobs are pickled into `hydra.launcher.submitit_folder`, which also receives the output of the jobs.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus

from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.launch.hydra_internals import submitit_calls, submitit_executor, submitit_general_settings
from rlhf.launch.jobs import failed

if TYPE_CHECKING:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
    from submitit import Job as Submitted

    from rlhf.launch.jobs import Job

_POLL_S = 1.0  # seconds between checks for results
_ASK_SLURM_S = 10.0  # seconds between calls of squeue; SLURM's controller is shared by all users
_LINGER_S = 15.0  # seconds after the end of a SLURM job until its result file must be visible on this host

# Keys of hydra.launcher -> names of SBATCH_ variables, where the names differ.
_SBATCH_NAMES = {
    "timeout_min": "TIMELIMIT",
    "signal_delay_s": "SIGNAL",
    "mem_gb": "MEM_PER_NODE",
    "name": "JOB_NAME",
}


def submit(
    launcher: BaseSubmititLauncher,
    jobs: Sequence[Job],
    first: int = 0,
    work: Callable[[int], JobReturn] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[JobReturn]:
    """Submit jobs as one array, wait until all jobs have ended, and return a result for each job.

    Args:
        launcher: the submitit launcher with its settings.
        jobs: the jobs to run.
        first: number of the first job.
        work: called in each job with the number of the job; None: the launcher carries out the overrides.
        meanwhile: called from time to time during the wait.

    Raises:
        UserError: SLURM is not installed here, rejects the jobs, or would stop them at once.
        KeyboardInterrupt, Interrupted: the wait was interrupted.
    """
    limit, warning = launcher.params["timeout_min"], launcher.params.get("signal_delay_s", 0)
    if limit * 60 <= warning:
        raise UserError(
            "hydra.launcher.timeout_min must be longer than hydra.launcher.signal_delay_s (otherwise a job "
            f"is stopped when it starts), got {limit} minutes and {warning} seconds; "
            f"set hydra.launcher.timeout_min={warning // 60 + 60}"
        )
    slurm = submitit_executor(launcher) == "slurm"
    if slurm and shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm needs SLURM (sbatch is not found here), got a machine without SLURM; run "
            "the command on a login node, or choose hydra/launcher=local"
        )
    queue = _Queue(Path(launcher.params["submitit_folder"].partition("%")[0]), slurm)
    running = {job.path: there for job in jobs if (there := queue.find(job)) is not None}
    new = [job for job in jobs if job.path not in running]
    if new:
        with _settings_over_environment(launcher.params), _ctrl_c_ignored():
            numbers: list[tuple[Any, ...]] = [(job.number,) for job in new]
            calls = numbers if work else submitit_calls([job.overrides for job in new], first)
            submitted = _executor(launcher).map_array(work or launcher, *zip(*calls, strict=True))
        for job, sent in zip(new, submitted, strict=True):
            queue.note(job, sent)
            running[job.path] = sent
    waited = [running[job.path] for job in jobs]
    try:
        for job, sent in zip(jobs, waited, strict=True):
            state = "submitted" if job in new else "still in the queue"
            print(f"{job.label}: {state} as job {sent.job_id}; output: {_output(sent)}", flush=True)
        return _wait(jobs, waited, queue, meanwhile)
    except KeyboardInterrupt:
        queue.cancel(waited)
        print(f"cancelled {len(waited)} jobs; each writes a checkpoint, and the same command resumes them")
        raise
    except Interrupted:
        if slurm:
            print("the jobs keep running; the same command waits for them again")
        else:
            queue.cancel(waited)
            with suppress(KeyboardInterrupt):
                _wait(jobs, waited, queue)
        raise


def _wait(
    jobs: Sequence[Job],
    submitted: Sequence[Submitted],
    queue: _Queue,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[JobReturn]:
    """Wait until all jobs have ended, and return a result for each job.

    Args:
        jobs: the jobs.
        submitted: the submitted job of each job.
        queue: the queue that reports results.
        meanwhile: called after each look at the queue.
    """
    results: dict[int, JobReturn] = {}
    while True:
        for number, (job, sent) in enumerate(zip(jobs, submitted, strict=True)):
            if number not in results and (result := queue.result(sent)) is not None:
                results[number] = result
                state = "failed" if result.status is JobStatus.FAILED else "done"
                print(f"{job.label}: {state}" + (f", in {job.path}" if job.path.is_dir() else ""))
        meanwhile()
        if len(results) == len(jobs):
            return [results[number] for number in range(len(jobs))]
        time.sleep(_POLL_S)


class _Queue:
    """A queue of submitted jobs, which reports whether a job runs and the result of each job.

    Args:
        folder: folder of submitit's files and of the files with job ids.
        slurm: whether the jobs are SLURM jobs; otherwise they are processes on this machine.
    """

    def __init__(self, folder: Path, slurm: bool) -> None:
        self.folder = folder.absolute()
        self.slurm = slurm
        self.known: set[str] = set()  # ids of this user's jobs that squeue listed last
        self.asked_at = -_ASK_SLURM_S  # time.monotonic() of the last successful squeue
        self.missing_since: dict[str, float] = {}  # job id -> time.monotonic(), for ended jobs without result

    def note(self, job: Job, sent: Submitted) -> None:
        """Write the id of a job to a file, for a later call of the same sweep."""
        self.record(job).write_text(f"{sent.job_id} {sent.num_tasks}\n")

    def record(self, job: Job) -> Path:
        """Return the file that stores the id of a job."""
        return self.folder / f"{job.path.name}.job"

    def find(self, job: Job) -> Submitted | None:
        """Return the SLURM job of an earlier call for `job`, if it is still in the queue; else None."""
        if not self.slurm or not self.record(job).is_file():
            return None
        from submitit import SlurmJob

        name, tasks = self.record(job).read_text().split()
        self.ask_slurm()
        if name not in self.known:
            return None
        return SlurmJob(folder=self.folder / "%j", job_id=name, tasks=list(range(int(tasks))))

    def ask_slurm(self) -> None:
        """Update `known` with squeue, at most every `_ASK_SLURM_S`; if squeue fails, keep `known`."""
        if time.monotonic() - self.asked_at < _ASK_SLURM_S:
            return
        answer = subprocess.run(
            ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"],
            capture_output=True,
            text=True,
        )
        if answer.returncode == 0:
            self.known = set(answer.stdout.split())
            self.asked_at = time.monotonic()

    def result(self, sent: Submitted) -> JobReturn | None:
        """Return the result that a job's first rank wrote; None while the job runs.

        A job that ended without a result file counts as failed.
        """
        result = sent.task(0).paths.result_pickle
        if result.is_file():
            with suppress(EOFError), result.open("rb") as stream:
                outcome, value = pickle.load(stream)
                return value if outcome == "success" else failed(RunError(_failure(str(value), sent)))
            return None
        if self.alive(sent):
            self.missing_since.pop(sent.job_id, None)
            return None
        missing_since = self.missing_since.setdefault(sent.job_id, time.monotonic())
        if time.monotonic() - missing_since < (_LINGER_S if self.slurm else _POLL_S):
            return None
        return failed(RunError(_failure("the job ended without a result (killed, or out of memory)", sent)))

    def alive(self, sent: Submitted) -> bool:
        """Return whether a job is running or queued.

        If squeue fails, a SLURM job counts as running.
        """
        if not self.slurm:
            return not sent.done()
        self.ask_slurm()
        return sent.job_id in self.known or time.monotonic() - self.asked_at > _ASK_SLURM_S

    def cancel(self, submitted: Sequence[Submitted]) -> None:
        """Send SIGTERM to jobs; each job writes a checkpoint and ends."""
        if self.slurm:
            subprocess.run(["scancel", *(sent.job_id for sent in submitted)])
            return
        for sent in submitted:
            if not sent.done():
                os.kill(int(sent.job_id), signal.SIGTERM)  # submitit's controller process forwards SIGTERM


def _executor(launcher: BaseSubmititLauncher) -> Any:
    """Return submitit's executor with the settings of `hydra.launcher`."""
    from submitit import AutoExecutor

    kind = submitit_executor(launcher)
    settings = dict(launcher.params)
    folder = settings.pop("submitit_folder")
    timeouts = settings.pop("max_num_timeout", 0)
    made = AutoExecutor(folder=folder, cluster=kind, **{f"{kind}_max_num_timeout": timeouts})
    general = submitit_general_settings()
    made.update_parameters(
        **{key if key in general else f"{kind}_{key}": value for key, value in settings.items()}
    )
    return made


@contextmanager
def _settings_over_environment(settings: dict[str, Any]) -> Iterator[None]:
    """Hide the SBATCH_ variables of keys that `hydra.launcher` sets, because sbatch prefers the variables.

    Raises:
        UserError: SLURM rejects the jobs that are submitted in this context.
    """
    hidden = {
        name: os.environ.pop(name)
        for key, value in settings.items()
        if value is not None and (name := f"SBATCH_{_SBATCH_NAMES.get(key, key.upper())}") in os.environ
    }
    try:
        yield
    except Exception as error:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        if not isinstance(error, FailedJobError | FailedSubmissionError):
            raise
        why = " ".join(str(error).split())
        raise UserError(
            f"hydra.launcher must be what SLURM accepts, got: {why}; change hydra.launcher.<key> or "
            "launchers/site.sh"
        ) from None
    finally:
        os.environ.update(hidden)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Let processes started in this context ignore Ctrl-C in the terminal; `_Queue.cancel` stops them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _output(sent: Submitted) -> Path:
    """Return the file with the output of a job's first rank."""
    return Path(sent.task(0).paths.stdout)


def _failure(text: str, sent: Submitted) -> str:
    """Return the last line of `text` with the job id and the file that has the details."""
    last = text.strip().splitlines()[-1]
    errors = sent.task(0).paths.stderr
    return f"job {sent.job_id}: {last}; see {errors if errors.is_file() else _output(sent)}"
