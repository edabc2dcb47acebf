"""A generator in a process of its own, so that sampling and training overlap.

    trainer's thread                 carrier thread                    process (rlhf/generators/serve.py)
    submit(prompts) ──▶ jobs ──▶ one job at a time ──── sample ────▶ Sampler.sample
    load(weights)   ──▶ jobs ──▶      "                 load ──────▶ Sampler.load
    future ◀──────────────────── answer, confirmed ◀─────────────────

Requests and loads are jobs of a `Worker`, first in, first out.

Which weights are kept. A version stays in its store (`rlhf/generators/transfer.py`: shared memory, or the
GPU) until the process has confirmed the next one. So when the process is lost, the weights of the job in its
hands are there: those confirmed last, whatever has been loaded behind it in the queue. A new process is given
these, then the job; the queue behind it has not moved. With `max_lag` n at most n + 2 versions are held: one
confirmed, and those of the loads not yet taken. Where all is answered before weights are loaded, as with
`max_lag` 0, there is just one.

In flight (`schedule.update=in_flight`) loads overtake requests, those that wait and the one in the process:
the carrier sends them after it, and its answer confirms those that came in time. Requests keep their order. A
new process is given the weights confirmed last, then those that overtook, then the lost request anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf.core.metrics import How, Stat
from rlhf.generators.generator import Generator
from rlhf.generators.service import SamplingFactory
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.transfer.weights import TransferError, confirm
from rlhf.processes.worker import Job, Worker, received

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.generators.sampler import SamplerFactory
    from rlhf.generators.transfer.weights import Manifest, WeightStore
    from rlhf.processes.worker import Limits


POLL_S = 0.01  # seconds between looks for loads that overtake a request


class WorkerGenerator(Worker, Generator):
    """Answers requests with a sampler in a process of its own.

    Weights are confirmed: the process says which version and which checksums it holds, and anything else than
    what was sent stops the run, with the next call or future. So does a process that is lost too often.

    Args:
        factory: makes the sampler, in the process.
        log: the file that takes the process's output.
        environment: its environment variables, beside the trainer's own.
        limits: of time, and of restarts.
        in_flight: loads overtake requests.
        store: how weights go to the process; None: through shared memory.
    """

    def __init__(
        self,
        factory: SamplerFactory,
        log: Path,
        environment: Mapping[str, str],
        limits: Limits,
        in_flight: bool = False,
        store: WeightStore | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.store = store or SharedWeights()
        self.confirmed: Manifest | None = None  # the weights that the process holds
        self.loads: deque[Manifest] = deque()  # that have overtaken requests, and are not confirmed yet
        self.load_s = 0.0  # seconds that the process took weights over, which `figures` has not told of
        super().__init__("generator", SamplingFactory(factory), log, environment, limits)

    # -- the trainer's side ------------------------------------------------------------------------

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for K responses to each prompt; returns at once.

        Raises:
            RunError: the generator failed since the last call.
        """
        return self.put(Job("sample", (prompts, sampling)))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights, which the process takes over when their turn comes.

        Raises:
            RunError: the generator failed since the last call, or there is not enough memory.
        """
        with self.lock:
            idle = not self.unanswered  # and the carrier waits: no request needs the weights confirmed last
        if idle and self.confirmed is not None:
            self.store.release(self.confirmed)
            self.confirmed = None
        self.put(Job("load", (self.store.write(weights, version),)))

    def figures(self) -> Metrics:
        """Restarts, and seconds that the process took weights over between requests, since the last call."""
        with self.lock:
            seconds, self.load_s = self.load_s, 0.0
        return {**super().figures(), "time/load_s": Stat(seconds, 1.0, How.sum)}

    def close(self) -> None:
        """End the process, in peace where it waits, else at once, and give the memory back."""
        super().close()
        self.store.close()

    # -- the carrier thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, and give it the weights that the one before held."""
        super().start()
        if self.confirmed is not None:
            self.hand_over(self.confirmed)

    def do(self, job: Job) -> Any:
        """Have the process take weights over, or answer a request."""
        if job.method == "load":
            return self.hand_over(*job.arguments)
        self.overtake()
        while self.loads:
            self.hand_over(self.loads[0])
            self.loads.popleft()
        return self.sample(*job.arguments)

    def hand_over(self, manifest: Manifest) -> None:
        """Have the process take weights over, and compare what it holds with what was sent."""
        begun = time.perf_counter()
        self.took(manifest, *self.ask("load", self.offer(manifest)))
        with self.lock:
            self.load_s += time.perf_counter() - begun

    def offer(self, manifest: Manifest) -> Manifest:
        """What the process is told about weights; where they cannot be sent, it is as if it were lost."""
        assert self.channel is not None
        return self.store.offer(manifest, self.channel.shut)

    def took(self, manifest: Manifest, version: int, taken: dict[str, int]) -> None:
        """Compare what the process holds with what was sent; what it held before is needed no more."""
        confirm(manifest, version, taken)
        self.store.finish(manifest)
        if self.confirmed is not None and self.confirmed is not manifest:
            self.store.release(self.confirmed)
        self.confirmed = manifest

    def overtake(self) -> list[Manifest]:
        """Take the loads out of the queue, in flight; returns their weights."""
        if not self.in_flight:
            return []
        with self.lock:
            found = [job.arguments[0] for job in self.jobs if job.method == "load"]
            self.jobs = deque(job for job in self.jobs if job.method != "load")
            self.unanswered -= len(found)  # the request in hand stands for them
        self.loads += found
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
                    channel.send(("load", (self.offer(manifest),)))
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

    def check(self) -> None:
        """Raise RunError where weights could not be sent to the process."""
        self.store.check()

    def stop(self) -> None:
        """End the process, and what is sent to it."""
        super().stop()
        self.store.forget()
