"""A generator in a process of its own, so that sampling and training overlap.

    trainer's thread                 carrier thread                    process (rlhf/generators/serve.py)
    submit(prompts) ──▶ jobs ──▶ one job at a time ──── sample ────▶ Sampler.sample
    load(weights)   ──▶ jobs ──▶      "                 load ──────▶ Sampler.load, from shared memory
    future ◀──────────────────── answer, confirmed ◀─────────────────

The queue of jobs is in the trainer, and the process is asked the next thing only when it has answered:
requests and loads are first in, first out, and when the process is lost, exactly one job is lost with it.

Which weights are kept. A version stays in shared memory until the process has confirmed the next one. So when
the process is lost, the weights of the job in its hands are there: those confirmed last, whatever has been
loaded behind it in the queue. A new process is given these, then the job; the queue behind it has not moved.
With `max_lag` n at most n + 2 versions are held: one confirmed, and those of the loads not yet taken.

In flight (`schedule.update=in_flight`) loads overtake requests, those that wait and the one in the process:
the carrier sends them after it, and its answer confirms those that came in time. Requests keep their order. A
new process is given the weights confirmed last, then those that overtook, then the lost request anew.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rlhf.batch import Prompts, Rollouts
from rlhf.console import say
from rlhf.errors import RunError, UserError
from rlhf.generators.generator import Sampling
from rlhf.generators.sampler import SamplerFactory
from rlhf.generators.serve import Channel
from rlhf.generators.transfer import Manifest, SharedWeights, TransferError, confirm
from rlhf.metrics import How, Metrics, Stat

CLOSE_S = 10.0  # seconds that a sampler has to release what it holds
POLL_S = 0.01  # seconds between looks for loads that overtake a request


class Lost(Exception):
    """The process died or did not answer in time; says which."""


class Closed(Exception):
    """The generator was closed."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What a process may take, and how often it is replaced."""

    start_s: float
    request_s: float  # also of a load
    restarts: int  # of the whole session


@dataclass(slots=True)
class Job:
    """A request (with prompts), or a load (with a manifest); with neither, that there is a process."""

    manifest: Manifest | None = None
    request: tuple[Prompts, Sampling] | None = None
    future: Future[Rollouts] = field(default_factory=Future)


class WorkerGenerator:
    """Answers requests with a sampler in a process of its own.

    Weights are confirmed: the process says which version and which checksums it holds, and anything else than
    what was sent stops the run, with the next call or future. So does a process that is lost too often.

    Args:
        factory: makes the sampler, in the process.
        log: the file that takes the process's output.
        environment: its environment variables, beside the trainer's own.
        limits: of time, and of restarts.
        in_flight: loads overtake requests.
    """

    def __init__(
        self,
        factory: SamplerFactory,
        log: Path,
        environment: Mapping[str, str],
        limits: Limits,
        in_flight: bool = False,
    ) -> None:
        self.factory = factory
        self.log = log
        self.environment = environment
        self.limits = limits
        self.in_flight = in_flight
        self.shared = SharedWeights()
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: the end
        self.lock = threading.Lock()  # of what both threads read: the next four, and the end of the queue
        self.unanswered = 1  # jobs; the first starts the process
        self.failure: RunError | UserError | None = None
        self.closing = False
        self.counted = 0  # restarts that `figures` has told of
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.confirmed: Manifest | None = None  # the weights that the process holds
        self.loads: deque[Manifest] = deque()  # that have overtaken requests, and are not confirmed yet
        self.overtaken: deque[Job | None] = deque()  # what they have overtaken
        self.carrier = threading.Thread(target=self.carry, name="generator", daemon=True)
        say(f"starting the generator's process (its log: {log})")
        self.carrier.start()

    # -- the trainer's side ------------------------------------------------------------------------

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for K responses to each prompt; returns at once.

        Raises:
            RunError: the generator failed since the last call.
        """
        return self.put(Job(request=(prompts, sampling)))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights into shared memory, where the process takes them over when their turn comes.

        Raises:
            RunError: the generator failed since the last call, or there is not enough shared memory.
        """
        self.put(Job(manifest=self.shared.write(weights, version)))

    def figures(self) -> Metrics:
        """Restarts since the last call."""
        with self.lock:
            new, self.counted = self.restarts - self.counted, self.restarts
        return {"generator/restarts": Stat(float(new), 1.0, How.sum)}

    def close(self) -> None:
        """End the process: in peace where it waits, else at once."""
        with self.lock:
            self.closing = True
            if self.unanswered and self.process is not None:
                kill(self.process)
        self.jobs.put(None)
        self.carrier.join()
        self.shared.close()

    def put(self, job: Job) -> Future[Rollouts]:
        """Queue a job."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            self.unanswered += 1
            self.jobs.put(job)
        return job.future

    # -- the carrier thread ------------------------------------------------------------------------

    def carry(self) -> None:
        """Carry jobs to the process and answers back, until the end of the queue or a failure."""
        job: Job | None = Job()  # asks for nothing but that the process is there
        try:
            while job is not None:
                rollouts = self.work_off(job)
                with self.lock:
                    self.unanswered -= 1
                if rollouts is not None:
                    job.future.set_result(rollouts)
                job = self.overtaken.popleft() if self.overtaken else self.jobs.get()
            self.ask("close", limit=CLOSE_S)
            raise Closed
        except (RunError, UserError) as error:
            self.fail(error, job)
        except (Closed, Lost):
            self.fail(RunError("the generator was closed"), job)
        except BaseException as error:  # a defect; nobody may wait for the thread that it ends
            self.fail(RunError(f"the generator's thread failed: {type(error).__name__}: {error}"), job)
            raise
        finally:
            self.stop()

    def work_off(self, job: Job) -> Rollouts | None:
        """Have the process do a job; where it is lost, have a new one do it.

        Raises:
            RunError: weights that are not what was sent, an error of the sampler, or too many processes lost.
        """
        while True:
            try:
                if self.process is None:
                    self.start()
                    if self.confirmed is not None and job.manifest is None:
                        self.hand_over(self.confirmed)
                if job.manifest is not None:
                    self.hand_over(job.manifest)
                    return None
                if job.request is None:
                    return None
                self.overtake()
                while self.loads:
                    self.hand_over(self.loads[0])
                    self.loads.popleft()
                return self.sample(*job.request)
            except Lost as lost:
                self.stop()
                with self.lock:
                    if self.closing:
                        raise Closed from None
                    if self.restarts == self.limits.restarts:
                        raise RunError(
                            f"the generator's process must not be lost more than {self.restarts} times "
                            f"(generator.restarts), got once more: it {lost}; its log is {self.log}; set "
                            "generator.restarts or generator.request_limit_s higher where it says nothing"
                        ) from None
                    self.restarts += 1
                say(
                    f"the generator's process {lost}; starting a new one with the weights of the lost request"
                )

    def hand_over(self, manifest: Manifest) -> None:
        """Have the process take weights over, and compare what it holds with what was sent."""
        self.took(manifest, *self.ask("load", manifest))

    def took(self, manifest: Manifest, version: int, taken: dict[str, int]) -> None:
        """Compare what the process holds with what was sent; what it held before is needed no more."""
        confirm(manifest, version, taken)
        if self.confirmed is not None and self.confirmed is not manifest:
            self.shared.release(self.confirmed)
        self.confirmed = manifest

    def overtake(self) -> list[Manifest]:
        """Move loads to the front of the queue, in flight; returns them. The others keep their order."""
        found: list[Manifest] = []
        while self.in_flight and not self.jobs.empty():
            job = self.jobs.get()
            if job is None or job.manifest is None:
                self.overtaken.append(job)
            else:
                found.append(job.manifest)
        self.loads += found
        with self.lock:
            self.unanswered -= len(found)  # the request in hand stands for them
        return found

    def sample(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Have the process answer a request; in flight, with the loads that come meanwhile.

        Raises:
            TransferError: by another version than the one confirmed before, and those that overtook.
        """
        assert self.confirmed is not None
        rollouts: Rollouts
        known = [self.confirmed.version]
        with self.lost("sample", self.limits.request_s) as channel:
            end = time.monotonic() + self.limits.request_s
            channel.send(("sample", (prompts, sampling, self.in_flight)))
            while self.in_flight and not channel.answers(POLL_S):
                if time.monotonic() > end:
                    raise TimeoutError
                for manifest in self.overtake():
                    channel.send(("load", (manifest,)))
            rollouts, in_time = received(channel)
            late = [received(channel) for _ in range(len(self.loads) - len(in_time))]
        for answer in (*in_time, *late):
            self.took(self.loads[0], *answer)
            self.loads.popleft()
        known += [version for version, _ in in_time]
        if not rollouts.versions() <= set(known):
            raise TransferError(
                f"a request must be sampled by version {' or '.join(map(str, known))}, the last loaded "
                f"before each token, got version {', '.join(map(str, sorted(rollouts.versions())))}"
            )
        return rollouts

    def fail(self, error: RunError | UserError, job: Job | None) -> None:
        """Give up: the job in hand, all that are queued and all that come end with `error`."""
        with self.lock:
            self.failure = error
            lost = [job, *self.overtaken]
            while not self.jobs.empty():
                lost.append(self.jobs.get())
            for each in lost:
                if each is not None:
                    each.future.set_exception(error)

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process and have it make its sampler.

        It leads a process group of its own: Ctrl-C in the terminal reaches the trainer alone, which then ends
        the group.
        """
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs, self.log.open("ab") as log, self.lock:
            if self.closing:
                raise Closed
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlhf.generators.serve", str(theirs.fileno()), str(os.getpid())],
                env={
                    **os.environ,
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
                f"the generator's process must be ready within {self.limits.start_s:g} seconds "
                f"(generator.start_limit_s), but it {lost}; its log is {self.log}"
            ) from None

    def ask(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        """What `Server.<method>` of the process answers.

        Raises:
            Lost: it died, or did not answer within `limit` seconds (by default, those of a request).
            RunError, UserError: what it raised.
        """
        with self.lost(method, limit or self.limits.request_s) as channel:
            channel.send((method, arguments))
            return received(channel)

    @contextmanager
    def lost(self, method: str, limit: float) -> Iterator[Channel]:
        """Raise Lost where the process dies, or lets `limit` seconds pass, while it is to do `method`."""
        assert self.channel is not None and self.process is not None
        self.channel.socket.settimeout(limit)
        try:
            yield self.channel
        except TimeoutError:
            raise Lost(f"did not {method} within {limit:g} seconds") from None
        except (OSError, EOFError, pickle.UnpicklingError):
            raise Lost(f"died ({ending(self.process)})") from None

    def stop(self) -> None:
        """End the process, if it is there, and what is between."""
        if self.process is not None:
            kill(self.process)
        if self.channel is not None:
            self.channel.close()
        self.process = self.channel = None


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


def environment(threads: int | None, device: torch.device) -> dict[str, str]:
    """Variables of a process: its CPU threads, and a GPU that is not the trainer's, where there are two."""
    found: dict[str, str] = {}
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        every = ",".join(str(i) for i in range(torch.cuda.device_count()))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or every
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[-1]
    return found
