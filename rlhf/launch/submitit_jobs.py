"""Jobs of a sweep in processes of their own, by submitit: as SLURM jobs, or on this machine.

What Hydra's submitit launcher does, and more: a job that dies does not end the wait for the others, a job
that is in SLURM's queue already is waited for and not submitted twice, Ctrl-C cancels. Jobs are pickled into
`hydra.launcher.submitit_folder`, where their output is too.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus

from rlhf.core.errors import Interrupted, RunError, UserError

if TYPE_CHECKING:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
    from submitit import Job as Submitted

    from rlhf.launch.jobs import Job


POLL_S = 1.0


ASK_SLURM_S = 10.0  # its controller serves everybody


SBATCH_NAMES = {
    "timeout_min": "TIMELIMIT",
    "signal_delay_s": "SIGNAL",
    "mem_gb": "MEM_PER_NODE",
    "name": "JOB_NAME",
}


LINGER_S = 15.0  # until what a job wrote at its end has to be seen here


def submit(launcher: BaseSubmititLauncher, jobs: Sequence[Job], first: int) -> list[JobReturn]:
    """Run `jobs`, the first of them number `first`, and wait for them.

    Raises:
        UserError: there is no SLURM here, or it does not take the jobs.
        KeyboardInterrupt, Interrupted: the wait was ended.
    """
    slurm = launcher._EXECUTOR == "slurm"
    if slurm and shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm needs SLURM (sbatch is not found here), got a machine without; run it "
            "where jobs are submitted, or choose hydra/launcher=local"
        )
    limit, warning = launcher.params["timeout_min"], launcher.params.get("signal_delay_s", 0)
    if limit * 60 <= warning:
        raise UserError(
            "hydra.launcher.timeout_min must be longer than hydra.launcher.signal_delay_s, seconds before it "
            f"(a job would be stopped as it starts, again and again), got {limit} minutes and {warning} "
            f"seconds; set hydra.launcher.timeout_min={warning // 60 + 60}"
        )
    queue = Queue(Path(launcher.params["submitit_folder"].partition("%")[0]), slurm)
    running = {job.folder.path: there for job in jobs if (there := queue.find(job)) is not None}
    new = [job for job in jobs if job.folder.path not in running]
    if new:
        with own_environment(launcher.params), ctrl_c_left_to_us():
            submitted = executor(launcher).map_array(launcher, *arguments(new, first))
        for job, sent in zip(new, submitted, strict=True):
            queue.note(job, sent)
            running[job.folder.path] = sent
    waited = [running[job.folder.path] for job in jobs]
    try:
        for job, sent in zip(jobs, waited, strict=True):
            state = "submitted" if job in new else "still in the queue"
            print(f"{job.label}: {state} as job {sent.job_id}; output: {output(sent)}", flush=True)
        return wait(jobs, waited, queue)
    except KeyboardInterrupt:
        queue.cancel(waited)
        print(f"cancelled {len(waited)} jobs; each makes a checkpoint, and the same command goes on")
        raise
    except Interrupted:
        if slurm:
            print("the jobs go on without this command; the same command waits for them again")
        else:
            queue.cancel(waited)
            with suppress(KeyboardInterrupt):
                wait(jobs, waited, queue)
        raise


def wait(jobs: Sequence[Job], submitted: Sequence[Submitted], queue: Queue) -> list[JobReturn]:
    """What became of each job, once all are over."""
    answers: dict[int, JobReturn] = {}
    while True:
        for number, (job, sent) in enumerate(zip(jobs, submitted, strict=True)):
            if number not in answers and (answer := queue.answer(sent)) is not None:
                answers[number] = answer
                failed = answer.status is JobStatus.FAILED
                print(f"{job.label}: {'failed' if failed else 'done'}, in {job.folder.path}")
        if len(answers) == len(jobs):
            return [answers[number] for number in range(len(jobs))]
        time.sleep(POLL_S)


class Queue:
    """The jobs that run, and how to hear of them."""

    def __init__(self, folder: Path, slurm: bool) -> None:
        self.folder = folder.absolute()
        self.slurm = slurm
        self.known: set[str] = set()  # ids of this user's jobs in SLURM's queue, at the last look
        self.looked = -ASK_SLURM_S
        self.missed: dict[str, float] = {}  # when a job was first not there, without having written an answer

    def note(self, job: Job, sent: Submitted) -> None:
        """Keep the id of a run's job, for a sweep that is started again while it runs."""
        self.record(job).write_text(f"{sent.job_id} {sent.num_tasks}\n")

    def record(self, job: Job) -> Path:
        """Where the id is kept."""
        return self.folder / f"{job.folder.path.name}.job"

    def find(self, job: Job) -> Submitted | None:
        """The job that a run has in SLURM's queue already."""
        if not self.slurm or not self.record(job).is_file():
            return None
        from submitit import SlurmJob

        name, tasks = self.record(job).read_text().split()
        self.look()
        if name not in self.known:
            return None
        return SlurmJob(folder=self.folder / "%j", job_id=name, tasks=list(range(int(tasks))))

    def look(self) -> None:
        """Ask SLURM which jobs it has; where it does not answer, they are as they were."""
        if time.monotonic() - self.looked < ASK_SLURM_S:
            return
        asked = subprocess.run(
            ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"],
            capture_output=True,
            text=True,
        )
        if asked.returncode == 0:
            self.known = set(asked.stdout.split())
            self.looked = time.monotonic()

    def answer(self, sent: Submitted) -> JobReturn | None:
        """What a job's first rank wrote at its end; a failure where it died without; None while it runs."""
        from rlhf.launch.jobs import raised

        result = sent.task(0).paths.result_pickle
        if result.is_file():
            with suppress(EOFError), result.open("rb") as stream:
                outcome, value = pickle.load(stream)
                return value if outcome == "success" else raised(RunError(told(str(value), sent)))
            return None
        if self.alive(sent):
            self.missed.pop(sent.job_id, None)
            return None
        missed = self.missed.setdefault(sent.job_id, time.monotonic())
        if time.monotonic() - missed < (LINGER_S if self.slurm else POLL_S):
            return None
        return raised(RunError(told("it ended without a word (killed, cancelled, or out of memory)", sent)))

    def alive(self, sent: Submitted) -> bool:
        """Whether a job is running, or waits to."""
        if not self.slurm:
            return not sent.done()
        self.look()
        return sent.job_id in self.known or time.monotonic() - self.looked > ASK_SLURM_S

    def cancel(self, submitted: Sequence[Submitted]) -> None:
        """SIGTERM to jobs: each makes a checkpoint and ends."""
        if self.slurm:
            subprocess.run(["scancel", *(sent.job_id for sent in submitted)])
            return
        for sent in submitted:
            if not sent.done():
                os.kill(int(sent.job_id), signal.SIGTERM)  # its controller passes it on


def executor(launcher: BaseSubmititLauncher) -> Any:
    """Submitit's executor with the settings of `hydra.launcher`.

    Raises:
        UserError: it does not know one of them.
    """
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from omegaconf import OmegaConf
    from submitit import AutoExecutor

    kind = launcher._EXECUTOR
    params = dict(launcher.params)
    folder = params.pop("submitit_folder")
    timeouts = params.pop("max_num_timeout", 0)
    made = AutoExecutor(folder=folder, cluster=kind, **{f"{kind}_max_num_timeout": timeouts})
    generic = set(OmegaConf.structured(BaseQueueConf).keys())
    made.update_parameters(
        **{key if key in generic else f"{kind}_{key}": value for key, value in params.items()}
    )
    return made


def arguments(jobs: Sequence[Job], first: int) -> Iterator[tuple[Any, ...]]:
    """The arguments of the launcher's call in each job, one tuple for each parameter."""
    state = Singleton.get_state()
    return zip(
        *(
            (job.overrides, "hydra.sweep.dir", number, f"job_id_for_{number}", state)
            for number, job in enumerate(jobs, first)
        ),
        strict=True,
    )


@contextmanager
def own_environment(params: dict[str, Any]) -> Iterator[None]:
    """Let what is set in `hydra.launcher` win over the site's SBATCH_..., which sbatch gives precedence."""
    hidden = {
        name: os.environ.pop(name)
        for key, value in params.items()
        if value is not None and (name := f"SBATCH_{SBATCH_NAMES.get(key, key.upper())}") in os.environ
    }
    try:
        yield
    except Exception as error:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        if not isinstance(error, FailedJobError | FailedSubmissionError):
            raise
        why = " ".join(str(error).split())
        raise UserError(
            f"hydra.launcher must be what SLURM accepts, got: {why}; mend hydra.launcher.<key> or "
            "launchers/site.sh"
        ) from error
    finally:
        os.environ.update(hidden)


@contextmanager
def ctrl_c_left_to_us() -> Iterator[None]:
    """Have processes that are started here not hear Ctrl-C in the terminal; they are told by us."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def output(sent: Submitted) -> Path:
    """What a job's first rank prints."""
    return Path(sent.task(0).paths.stdout)


def told(text: str, sent: Submitted) -> str:
    """The last line of `text`, and where to read on."""
    last = text.strip().splitlines()[-1]
    errors = sent.task(0).paths.stderr
    return f"job {sent.job_id}: {last}; see {errors if errors.is_file() else output(sent)}"
