"""Work in a process of its own, given by a trainer that does not wait for it.

    trainer's thread              carrier thread                     process (rlhf/serve.py)
    put(job) ──▶ jobs ──▶ one job at a time ──── method, arguments ────▶ Service.<method>
    future ◀──────────────────── answer ◀────────────────────────────────

The queue of jobs is in the trainer, and the process is asked the next thing only when it has answered: jobs
are first in, first out, and when the process is lost, exactly one job is lost with it, which a new process is
given again. The queue behind it has not moved.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.core.console import say
from rlhf.core.errors import RunError, UserError
from rlhf.core.metrics import How, Stat
from rlhf.processes.service import Channel

if TYPE_CHECKING:
    from rlhf.core.metrics import Metrics
    from rlhf.processes.service import ServiceFactory


CLOSE_S = 10.0  # seconds that a process has to release what it holds


class Lost(Exception):
    """The process died or did not answer in time; says which."""


class Closed(Exception):
    """The worker was closed."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What a process may take, and how often it is replaced."""

    start_s: float
    request_s: float  # of any job
    restarts: int  # of the whole session


@dataclass(slots=True)
class Job:
    """What the process is to do: a method of its service, and the arguments; None: only that it is there."""

    method: str | None = None
    arguments: tuple[Any, ...] = ()
    future: Future[Any] = field(default_factory=Future)


class Worker:
    """Has jobs done in a process of its own, in their order.

    An error of the service stops the run, with the next call or future. So does a process that is lost too
    often.

    Args:
        name: what it is, in messages: "generator".
        factory: makes the service, in the process.
        log: the file that takes the process's output.
        environment: its environment variables, beside the trainer's own.
        limits: of time, and of restarts.
    """

    def __init__(
        self,
        name: str,
        factory: ServiceFactory,
        log: Path,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.name = name
        self.factory = factory
        self.log = log
        self.environment = environment
        self.limits = limits
        self.lock = threading.Lock()  # of what both threads use: the next six
        self.changed = threading.Condition(self.lock)  # there is a job, or the end
        self.jobs: deque[Job] = deque()  # those that wait
        self.unanswered = 1  # jobs; the first starts the process
        self.failure: RunError | UserError | None = None
        self.closing = False
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.scratch: str | None = None  # temporary folder of the process
        self.restarts = 0
        self.counted = 0  # restarts that `figures` has told of
        self.carrier = threading.Thread(target=self.carry, name=name, daemon=True)
        say(f"starting the {name}'s process (its log: {log})")
        self.carrier.start()

    # -- the trainer's side ------------------------------------------------------------------------

    def put(self, job: Job) -> Future[Any]:
        """Queue a job; its future has what the process answers. May be called from any thread.

        Raises:
            RunError, UserError: the worker failed since the last call.
        """
        with self.changed:
            if self.failure is not None:
                raise self.failure
            self.unanswered += 1
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    def figures(self) -> Metrics:
        """Restarts since the last call."""
        with self.lock:
            new, self.counted = self.restarts - self.counted, self.restarts
        return {f"{self.name}/restarts": Stat(float(new), 1.0, How.sum)}

    def close(self) -> None:
        """End the process: in peace where it waits, else at once."""
        with self.changed:
            self.closing = True
            if self.unanswered and self.process is not None:
                kill(self.process)
            self.changed.notify()
        self.carrier.join()

    # -- the carrier thread ------------------------------------------------------------------------

    def carry(self) -> None:
        """Carry jobs to the process and answers back, until the end of the queue or a failure."""
        job: Job | None = Job()
        try:
            while job is not None:
                answer = self.work_off(job)
                with self.lock:
                    self.unanswered -= 1
                job.future.set_result(answer)
                job = self.next()
            self.ask("close", limit=CLOSE_S)
            raise Closed
        except (RunError, UserError) as error:
            self.fail(error, job)
        except (Closed, Lost):
            self.fail(RunError(f"the {self.name} was closed"), job)
        except BaseException as error:  # a defect; nobody may wait for the thread that it ends
            self.fail(RunError(f"the {self.name}'s thread failed: {type(error).__name__}: {error}"), job)
            raise
        finally:
            self.stop()

    def next(self) -> Job | None:
        """Wait for the next job; None: the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closing)
            return self.jobs.popleft() if self.jobs else None

    def work_off(self, job: Job) -> Any:
        """Have the process do a job; where it is lost, have a new one do it.

        Raises:
            RunError, UserError: an error of the service, or too many processes lost.
        """
        while True:
            try:
                if self.process is None:
                    self.start()
                return self.do(job) if job.method is not None else None
            except Lost as lost:
                self.stop()
                with self.lock:
                    if self.closing:
                        raise Closed from None
                    if self.restarts == self.limits.restarts:
                        raise RunError(
                            f"the {self.name}'s process must not be lost more than {self.restarts} times "
                            f"(generator.restarts), got once more: it {lost}; its log is {self.log}; set "
                            "generator.restarts or generator.request_limit_s higher where it says nothing"
                        ) from None
                    self.restarts += 1
                say(f"the {self.name}'s process {lost}; starting a new one, with the job that was lost")

    def do(self, job: Job) -> Any:
        """Have the process do a job that has a method, once; returns what its future is to have."""
        assert job.method is not None
        return self.ask(job.method, *job.arguments)

    def fail(self, error: RunError | UserError, job: Job | None) -> None:
        """Give up: the job in hand, all that are queued and all that come end with `error`."""
        with self.lock:
            self.failure = error
            lost = [*([] if job is None else [job]), *self.jobs]
            self.jobs.clear()
        for each in lost:
            each.future.set_exception(error)

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process and have it make its service.

        It leads a process group of its own: Ctrl-C in the terminal reaches the trainer alone, which then ends
        the group. Temporary files are in a folder of its own, for a process that is killed removes none.
        """
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.scratch = tempfile.mkdtemp(prefix=f"rlhf-{self.name}-")
        words = [
            "-m",
            "rlhf.processes.service",
            self.log.stem,
            str(theirs.fileno()),
            str(os.getpid()),
            self.scratch,
        ]
        with theirs, self.log.open("ab") as log, self.lock:
            if self.closing:
                raise Closed
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", *words],  # -u: what it printed is in the log when it is killed
                env={
                    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
                    **os.environ,
                    "TMPDIR": self.scratch,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **self.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        try:
            self.ask("build", self.factory, limit=self.limits.start_s)
        except Lost as lost:
            if (self.process.poll() or 0) < 0:  # killed, by whom or whatever: worth another try
                raise
            raise RunError(
                f"the {self.name}'s process must be ready within {self.limits.start_s:g} seconds "
                f"(generator.start_limit_s), but it {lost}; its log is {self.log}"
            ) from None

    def ask(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        """What the process answers to a question.

        Raises:
            Lost: it died, or did not answer within `limit` seconds (by default, those of a request).
            RunError, UserError: what it raised.
        """
        with self.lost(method, limit or self.limits.request_s) as channel:
            channel.send((method, arguments))
            return received(channel)

    @contextmanager
    def lost(self, method: str, limit: float) -> Iterator[Channel]:
        """Raise Lost where the process dies, or lets `limit` seconds pass, while it is to do `method`.

        Raises:
            RunError: the connection broke at this end, for a reason that `check` knows.
        """
        assert self.channel is not None and self.process is not None
        self.channel.socket.settimeout(limit)
        try:
            yield self.channel
        except TimeoutError:
            raise Lost(f"did not {method} within {limit:g} seconds") from None
        except (OSError, EOFError, pickle.UnpicklingError):
            how = ending(self.process)
            if self.process.poll() is None:  # it was not the process that ended
                self.check()
            raise Lost(f"died ({how})") from None

    def check(self) -> None:  # noqa: B027
        """Raise RunError where the connection broke at this end; here it does not."""

    def stop(self) -> None:
        """End the process, if it is there, and what is between."""
        if self.process is not None:
            kill(self.process)
        if self.channel is not None:
            self.channel.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.process = self.channel = self.scratch = None


def received(channel: Channel) -> Any:
    """The next answer; raises it where it is an error."""
    answer = channel.receive()
    if isinstance(answer, (RunError, UserError)):
        raise answer
    return answer


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words."""
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def environment(threads: int | None, device: torch.device, replica: int = 0) -> dict[str, str]:
    """Variables of a process, the first or another of its kind: its CPU threads, and a GPU that is not the
    trainer's, where there are two; replicas take all GPUs but the first in turn, from the last on.
    """
    found: dict[str, str] = {}
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        every = ",".join(str(i) for i in range(torch.cuda.device_count()))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or every
        others = visible.split(",")[1:]
        found["CUDA_VISIBLE_DEVICES"] = others[-1 - replica % len(others)]
    return found
