"""Worker processes: the trainer queues jobs for a process and continues without waiting for the results.

    trainer's thread              carrier thread                worker process (`main`)
    put(job) ──▶ jobs ──▶ one job at a time ──── method, arguments ────▶ Service.<method>
    future ◀──────────────────── answer ◀────────────────────────────────

The queue is in the trainer. The next job is sent only after the process has answered the previous job. So
jobs are executed first in, first out. If the process is lost, exactly one job is lost, and a new process gets
this job again; the jobs in the queue are not affected. The process runs this module, which imports torch only
where the trainer needs it, so that the process handles signals from its start:

    TMPDIR=<own folder> python -m rlhf.processes.worker <name> <inherited socket fd>

The first request is `build`, with the function that makes the service. Every other request is the name of a
method of the service and its arguments. The answer is the returned value, or the error that the method
raised. Messages are pickled, which is safe because only trainer and worker process have the socket. When the
trainer ends, the worker process removes its temporary folder and ends within a second, even while it answers
a request.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlhf.core.errors import OutOfMemory, RunError, UserError
from rlhf.core.launched import local_rank, local_world_size, without_rank
from rlhf.core.machine import worker_gpu
from rlhf.processes.signals import PARENT, SCRATCH, SIGNALS, end_group, end_with_others, ignore, kill_group
from rlhf.terminal.console import say

if TYPE_CHECKING:
    import torch

    from rlhf.core.metrics import Metrics

_CLOSE_S = 10.0  # time limit in seconds for a process to release its resources
_LENGTH = struct.Struct("<Q")  # header of a message: its number of bytes
_PIECE = 1 << 20  # maximum number of bytes read at once


class _Disconnected(EOFError):
    """An error: the other side closed the connection or ended."""


class Channel:
    """A connection that sends and receives Python objects over a socket.

    While `send` writes, it also reads the bytes that arrive. So two sides do not deadlock if both send more
    than the socket buffers, for example an answer and a load of weights at the same time. A method raises
    TimeoutError if the time limit of the socket is exceeded.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.inbox = bytearray()  # bytes that have arrived and were not yet returned by `receive`

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
        """
        data = pickle.dumps(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        reading = [self.socket]
        while left:
            arrived, free, _ = select.select(reading, [self.socket], [], self.socket.gettimeout())
            if not arrived and not free:
                raise TimeoutError
            if arrived and not self.take():
                reading = []  # the other side stopped sending; `socket.send` fails if the socket is closed
            if free:
                try:
                    left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
                except ConnectionError:
                    raise _Disconnected from None

    def receive(self) -> Any:
        """Wait for the next message and return it.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
            UnpicklingError: the message is damaged.
        """
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        return pickle.loads(self.read(length))

    def answers(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for a message; return whether its first bytes have arrived."""
        return bool(self.inbox or select.select([self.socket], [], [], within_s)[0])

    def pending(self) -> bool:
        """Return whether the first bytes of the next message have arrived, without waiting."""
        if not self.inbox and self.answers(0):
            self.take()
        return bool(self.inbox)

    def read(self, count: int) -> bytes:
        """Wait for `count` bytes and return them.

        Raises:
            Disconnected: the other side closed the connection or ended.
            OSError: the connection failed; TimeoutError if the time limit was exceeded.
        """
        while len(self.inbox) < count:
            if not self.take():
                raise _Disconnected
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        return data

    def take(self) -> bool:
        """Wait for bytes and add them to the inbox; return False if the other side closed the connection."""
        try:
            data = self.socket.recv(_PIECE)
        except ConnectionError:
            return False
        self.inbox += data
        return bool(data)

    def shut(self) -> None:
        """Shut down the connection, so that a thread that waits on either side gets EOFError."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the other side gets EOFError."""
        self.socket.close()


class Service:
    """An object in a worker process whose methods the trainer calls."""

    def close(self) -> None:
        """Release resources when the trainer no longer needs the service; by default, do nothing."""


class _Lost(Exception):
    """An error: the process ended or exceeded its time limit; the message states which of the two.

    Args:
        text: what happened, as the predicate of a sentence about the process.
        limit: config key of the time limit that a slow process may need.
    """

    def __init__(self, text: str, limit: str = "generator.request_limit_s") -> None:
        super().__init__(text)
        self.limit = limit


class _Closed(Exception):
    """An error: the worker was closed."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Time limits of a worker process, and the maximum number of restarts."""

    start_s: float  # seconds until the service is ready
    request_s: float  # seconds for one job
    restarts: int  # maximum number per session


@dataclass(slots=True)
class Job:
    """A call of a method of the service. Without a method, the job only starts the process."""

    method: str | None = None
    arguments: tuple[Any, ...] = ()
    future: Future[Any] = field(default_factory=Future)


class Spawned(subprocess.Popen[bytes]):
    """A process that leads its own process group and has its own folder for temporary files.

    Ctrl-C in the terminal reaches only this process, which then kills the group. A killed process does not
    remove its temporary files.

    Args:
        command: program and arguments.
        environment: environment variables, in addition to those of this process without its rank. The new
            process imports the same modules.
        log: file for the output; None: the output of this process.
        prefix: begin of the name of the folder for temporary files (`TMPDIR` of the process).
        inherited: file descriptors that the process gets.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        log: BinaryIO | None,
        prefix: str,
        inherited: Collection[int] = (),
    ) -> None:
        self.scratch = tempfile.mkdtemp(prefix=prefix)
        own = without_rank(os.environ)  # first: vLLM needs its first variable to name its processes
        own.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        own["TMPDIR"] = own[SCRATCH] = self.scratch
        own[PARENT] = str(os.getpid())
        own["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        super().__init__(
            command,
            env={**own, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            process_group=0,
        )

    def kill_all(self) -> None:
        """Kill the process and its process group."""
        kill_group(self.pid)
        self.wait()

    def end(self) -> None:
        """Kill the process group, and remove the temporary files."""
        self.kill_all()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def ending(self) -> str:
        """Return how the process ended, for messages."""
        try:
            code = self.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Worker:
    """A queue of jobs that are executed in order in a worker process.

    An error of the service is raised by the future of the job and by later calls of `put`, and ends the run.
    If the process is lost more often than `limits.restarts`, the worker raises an error in the same way.

    Args:
        name: name of the process in messages, for example "generator".
        make: creates the service in the process, given the connection, which the service may read during a
            request; it is pickled and sent to the process.
        log: file for the output of the process.
        environment: environment variables of the process, in addition to those of the trainer, of which the
            process does not inherit the variables of the trainer's rank.
        limits: time limits, and the maximum number of restarts.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Channel], Service],
        log: Path,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.name, self.make, self.log = name, make, log
        self.environment, self.limits = environment, limits
        self.lock = threading.Lock()  # protects jobs, unanswered, failure, closing, process, restarts
        self.changed = threading.Condition(self.lock)  # a job was queued, or the worker is closing
        self.jobs: deque[Job] = deque()  # jobs that have not been started
        self.unanswered = 1  # number of unfinished jobs; the first job starts the process
        self.failure: RunError | UserError | None = None
        self.closing = False
        self.process: Spawned | None = None
        self.channel: Channel | None = None
        self.restarts = 0
        self.counted = 0  # restarts that `figures` has reported
        self.carrier = threading.Thread(target=self.carry, name=name, daemon=True)
        say(f"starting the {name} process; log: {log.name} in the run folder")
        self.carrier.start()

    # -- the trainer's side ------------------------------------------------------------------------

    def put(self, job: Job) -> Future[Any]:
        """Queue a job and return its future, whose result is the answer of the process.

        The method may be called from any thread.

        Raises:
            RunError, UserError: the worker has failed.
        """
        with self.changed:
            if self.failure is not None:
                raise self.failure
            self.unanswered += 1
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    def figures(self) -> Metrics:
        """Return the number of restarts since the last call as a metric."""
        from rlhf.core.metrics import How, Stat

        with self.lock:
            new, self.counted = self.restarts - self.counted, self.restarts
        return {f"{self.name}/restarts": Stat(float(new), 1.0, How.sum)}

    def close(self) -> None:
        """End the process: an idle process releases its resources first, a busy process is killed."""
        with self.changed:
            self.closing = True
            if self.unanswered and self.process is not None:
                self.process.kill_all()
            self.changed.notify()
        self.carrier.join()

    # -- the carrier thread ------------------------------------------------------------------------

    def carry(self) -> None:
        """Send jobs to the process and set their results, until the worker is closed or fails."""
        job: Job | None = Job()
        try:
            while job is not None:
                answer = self.complete(job)
                with self.lock:
                    self.unanswered -= 1
                job.future.set_result(answer)
                with self.changed:
                    self.changed.wait_for(lambda: self.jobs or self.closing)
                    job = self.jobs.popleft() if self.jobs else None  # None: the worker is closing
            self.ask("close", limit=_CLOSE_S)
            raise _Closed
        except (RunError, UserError) as error:
            self.fail(error, job)
        except (_Closed, _Lost):
            self.fail(RunError(f"the {self.name} was closed"), job)
        except BaseException as error:  # a bug; the trainer must not wait for a thread that has ended
            self.fail(RunError(f"the {self.name} thread failed: {type(error).__name__}: {error}"), job)
            raise
        finally:
            self.stop()

    def complete(self, job: Job) -> Any:
        """Execute a job in the process and return its result; if the process is lost, restart it and repeat.

        Raises:
            RunError, UserError: an error of the service, or too many restarts.
            Closed: the worker was closed.
        """
        while True:
            try:
                if self.process is None:
                    self.start()
                return self.do(job) if job.method is not None else None
            except _Lost as lost:
                self.stop()
                with self.lock:
                    if self.closing:
                        raise _Closed from None
                    if self.restarts == self.limits.restarts:
                        raise RunError(
                            f"the {self.name} process must not fail more than {self.restarts} times "
                            f"(generator.restarts), but it failed again: it {lost}; its log is {self.log}; "
                            f"if the log shows no cause, set generator.restarts or {lost.limit} higher"
                        ) from None
                    self.restarts += 1
                say(f"the {self.name} process {lost}; restarting it and repeating the lost job")

    def do(self, job: Job) -> Any:
        """Execute a job with a method once, and return the result for its future."""
        assert job.method is not None
        return self.ask(job.method, *job.arguments)

    def fail(self, error: RunError | UserError, job: Job | None) -> None:
        """Set `error` on the current job and on all queued jobs; later calls of `put` raise it."""
        with self.lock:
            self.failure = error
            lost = [*([] if job is None else [job]), *self.jobs]
            self.jobs.clear()
        for each in lost:
            each.future.set_exception(error)

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process and create its service.

        Raises:
            Closed: the worker was closed.
            Lost: a signal killed the process before the service was ready, or the service was not ready
                within the time limit.
            RunError, UserError: the process ended by itself, or the service cannot be created.
        """
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        own = {"OMP_WAIT_POLICY": "PASSIVE", **self.environment}
        command = [sys.executable, "-P", "-u", "-m", __name__]  # -u: a complete log
        command += [self.log.stem, str(theirs.fileno())]
        with theirs, self.log.open("ab") as log, self.lock:
            if self.closing:
                raise _Closed
            self.process = Spawned(command, own, log, f"rlhf-{self.name}-", [theirs.fileno()])
        try:
            self.ask("build", self.make, limit=self.limits.start_s)
        except _Lost as lost:
            code = self.process.poll()
            if code is None or code < 0:  # too slow, or killed by a signal: try again
                raise
            raise RunError(
                f"the {self.name} process must start, but it {lost}; its log is {self.log}"
            ) from None

    def ask(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        """Call a method of the service in the process and return its result.

        Args:
            method: name of the method.
            arguments: positional arguments.
            limit: time limit in seconds; None: the limit of a job.

        Raises:
            Lost: the process ended, or exceeded the time limit.
            RunError, UserError: raised by the method.
        """
        with self.lost(method, limit or self.limits.request_s) as channel:
            channel.send((method, arguments))
            return received(channel)

    @contextmanager
    def lost(self, method: str, limit: float) -> Iterator[Channel]:
        """Yield the connection for a call of `method`, and raise Lost for an error of the connection.

        Raises:
            Lost: the process ended, or exceeded the time limit of `limit` seconds.
            RunError: the connection failed on the trainer's side, and `check` reports the cause.
        """
        assert self.channel is not None and self.process is not None
        self.channel.socket.settimeout(limit)
        try:
            yield self.channel
        except TimeoutError:
            start = method == "build"
            key = f"generator.{'start' if start else 'request'}_limit_s"
            raise _Lost(f"did not {'start' if start else method} within {limit:g} seconds", key) from None
        except (OSError, EOFError, pickle.UnpicklingError):
            how = self.process.ending()
            self.check()
            raise _Lost(f"died ({how})") from None

    def check(self) -> None:  # noqa: B027
        """Raise RunError if the connection failed on the trainer's side; by default, do nothing."""

    def stop(self) -> None:
        """Kill the process, if any, close its connection and remove its temporary folder."""
        if self.process is not None:
            self.process.end()
        if self.channel is not None:
            self.channel.close()
        self.process = self.channel = None


def received(channel: Channel) -> Any:
    """Wait for the next answer; return it, or raise it if it is an error."""
    answer = channel.receive()
    if isinstance(answer, (RunError, UserError)):
        raise answer
    return answer


def environment(
    threads: int | None, device: torch.device, number: int = 0, reserved: Collection[int] = ()
) -> dict[str, str]:
    """Return environment variables for a worker process: its CPU threads and its GPU.

    Args:
        threads: CPU threads of the process; None: the default of torch.
        device: the trainer's device. With CUDA and at least two GPUs, the process gets the GPU that
            `worker_gpu` returns.
        number: number of the process among the worker processes of this host, from 0.
        reserved: GPUs that the process must not use, besides those of the ranks.
    """
    import torch

    variables: dict[str, str] = {}
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if device.type == "cuda" and (gpus := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        gpu = worker_gpu(number, gpus, local_world_size(), local_rank(), reserved)
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu]
    return variables


# The worker process.


def answer(name: str, method: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the answer to one request in the process `name`: the result, or the error.

    The traceback of an unexpected error is written to the log of the process.

    Raises:
        Disconnected: the trainer ended while the service read from the connection.
    """
    try:
        return function(*arguments)
    except _Disconnected:
        raise
    except (UserError, RunError) as error:
        return error
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        text = f"the {name} failed to {method}: {kind}: {error}; the traceback is in {name}.log"
        if kind != "OutOfMemoryError":  # of torch, which this module does not import
            return RunError(text)
        full = OutOfMemory(text)
        full.process = name
        return full


def main() -> None:
    """Answer requests until the trainer requests `close` or ends.

    The process ignores the signals that stop a run. A launcher may send them to every process of a run, but
    the trainer decides when the worker process ends.
    """
    for number in SIGNALS:
        signal.signal(number, ignore)
        signal.siginterrupt(number, False)  # system calls continue
    end_with_others()
    name, descriptor = sys.argv[1:]
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)
    channel, service, method = Channel(sock), Service(), ""

    def build(make: Callable[[Channel], Service]) -> None:
        nonlocal service
        service = make(channel)

    while method != "close":
        try:
            method, arguments = channel.receive()
            function = build if method == "build" else getattr(service, method)
            channel.send(answer(name, method, function, arguments))
        except _Disconnected:  # the trainer has ended, or will kill this process
            end_group()


if __name__ == "__main__":
    main()
