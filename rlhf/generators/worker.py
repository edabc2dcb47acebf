"""A generator in a separate process, so that sampling and training overlap.

    trainer's thread                 carrier thread                    process (generators/service.py)
    submit(prompts) ──▶ jobs ──▶ one job at a time ──── sample ────▶ Sampler.sample
    load(weights)   ──▶ jobs ──▶      "                 load ──────▶ Sampler.load
    future ◀──────────────────── answer, confirmed ◀─────────────────

Requests and loads are jobs of a `Worker`, first in, first out.

Kept versions: a version stays in its store (`rlhf/generators/transfer/`: shared memory, or the GPU) until the
process has confirmed the next version. So if the process is lost, the weights of its current job still exist:
they are the weights confirmed last, regardless of the loads in the queue. A new process gets these weights,
then the lost job; the queue does not change. At most two versions are kept, regardless of `schedule.max_lag`:
the confirmed version and the version of the next load. If the process has not confirmed a load when the
trainer wants to send the next one, the trainer waits; the answers of the process wait in the trainer. If
every request is answered before the next load, as with `max_lag=0`, only one version is kept.

In-flight updates (`schedule.update=in_flight`): loads overtake the requests in the queue and the running
request. The carrier thread sends a load while the request runs, and the answer to the request confirms the
loads that were executed before its end. The order of the requests does not change. A new process gets the
weights confirmed last, then the loads that overtook the lost request, then the lost request. At most four
versions are kept, so up to three loads can overtake one request.
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
from rlhf.generators.transfer.kept_versions import most_versions
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.transfer.weights import TransferError, confirm
from rlhf.processes.worker import Job, Worker, received

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.generators.sampler import SamplerFactory
    from rlhf.generators.transfer.weights import Manifest, WeightStore
    from rlhf.processes.worker import Limits

_POLL_S = 0.01  # seconds between checks for loads that overtake a request


class WorkerGenerator(Worker, Generator):
    """A generator whose sampler runs in a separate process.

    After each load the process reports the version and the checksums of its weights. If the report differs
    from the weights that the trainer sent, the run stops: the next call or future raises TransferError. The
    run also stops if the process is lost more often than `limits.restarts`.

    Args:
        factory: creates the sampler in the process.
        log: file for the output of the process.
        environment: environment variables of the process, in addition to those of the trainer.
        limits: time limits, and the maximum number of restarts.
        in_flight: whether loads overtake requests.
        store: store that sends weights to the process; None: shared memory.
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
        self.confirmed: Manifest | None = None  # the weights that the process confirmed last
        self.loads: deque[Manifest] = deque()  # loads that have overtaken requests and are not confirmed yet
        self.load_s = 0.0  # seconds of loading that `figures` has not reported yet
        super().__init__("generator", SamplingFactory(factory), log, environment, limits)

    # -- the trainer's side ------------------------------------------------------------------------

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt, without waiting for them.

        Raises:
            RunError: the generator has failed.
        """
        return self.put(Job("sample", (prompts, sampling)))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights to the store, and queue a load for the process.

        Raises:
            RunError: the generator has failed, or there is not enough memory.
        """
        with self.lock:
            idle = not self.unanswered  # if idle, no request needs the weights confirmed last
        if idle and self.confirmed is not None:
            self.store.release(self.confirmed)
            self.confirmed = None
        self.wait()
        self.put(Job("load", (self.store.write(weights, version),)))

    def wait(self) -> None:
        """Wait until the store keeps fewer than `most_versions` versions.

        Raises:
            RunError: the generator has failed.
        """
        self.store.wait(most_versions(1, self.in_flight), self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of the generator, if it has failed."""
        with self.lock:
            if self.failure is not None:
                raise self.failure

    def figures(self) -> Metrics:
        """Return the restarts and the seconds of loads between requests, both since the last call."""
        with self.lock:
            seconds, self.load_s = self.load_s, 0.0
        return {**super().figures(), "time/load_s": Stat(seconds, 1.0, How.sum)}

    def close(self) -> None:
        """End the process and free the memory of all versions.

        An idle process releases its resources first; a busy process is killed.
        """
        super().close()
        self.store.close()

    # -- the carrier thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, and load the weights that the previous process confirmed last."""
        super().start()
        if self.confirmed is not None:
            self.hand_over(self.confirmed)

    def do(self, job: Job) -> Any:
        """Execute a job in the process: a load, or a request after the loads that overtook it."""
        if job.method == "load":
            return self.hand_over(*job.arguments)
        self.overtake()
        while self.loads:
            self.hand_over(self.loads[0])
            self.loads.popleft()
        return self.sample(*job.arguments)

    def hand_over(self, manifest: Manifest) -> None:
        """Load weights into the process, and check the version and checksums that the process reports.

        Raises:
            Lost: the process ended, or exceeded the time limit.
            TransferError: version or checksums of the process differ from the weights that were sent.
        """
        start = time.perf_counter()
        self.check_loaded(manifest, *self.ask("load", self.offer(manifest)))
        with self.lock:
            self.load_s += time.perf_counter() - start

    def offer(self, manifest: Manifest) -> Manifest:
        """Return the manifest to send to the process; the store may start to send the weights in parallel.

        If the weights cannot be sent, the connection to the process is shut down, and `check` raises the
        cause.
        """
        assert self.channel is not None
        return self.store.offer(manifest, self.channel.shut)

    def check_loaded(self, manifest: Manifest, version: int, checksums: dict[str, int]) -> None:
        """Check that the process has loaded the weights that were sent, and release the previous version.

        Raises:
            TransferError: version or checksums of the process differ from the weights that were sent.
        """
        confirm(manifest, version, checksums)
        self.store.finish(manifest)
        if self.confirmed is not None and self.confirmed is not manifest:
            self.store.release(self.confirmed)
        self.confirmed = manifest

    def overtake(self) -> list[Manifest]:
        """With in-flight updates, move all loads from the queue to `loads` and return their manifests."""
        if not self.in_flight:
            return []
        with self.lock:
            manifests = [job.arguments[0] for job in self.jobs if job.method == "load"]
            self.jobs = deque(job for job in self.jobs if job.method != "load")
            self.unanswered -= len(manifests)  # the current request, which is counted, includes these loads
        self.loads += manifests
        return manifests

    def sample(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return the answer of the process to a request; with in-flight updates, also send new loads.

        Raises:
            Lost: the process ended, or exceeded the time limit.
            TransferError: a load was not confirmed, or a token was sampled by a version that was neither
                confirmed before the request nor loaded during the request.
        """
        assert self.confirmed is not None
        rollouts: Rollouts
        known = [self.confirmed.version]
        with self.lost("sample", self.limits.request_s) as channel:
            end = time.monotonic() + self.limits.request_s
            channel.send(("sample", (prompts, sampling, self.in_flight)))
            while self.in_flight and not channel.answers(_POLL_S):
                if time.monotonic() > end:
                    raise TimeoutError
                for manifest in self.overtake():
                    channel.send(("load", (self.offer(manifest),)))
            rollouts, in_time = received(channel)
            late = [received(channel) for _ in range(len(self.loads) - len(in_time))]
        for answer in (*in_time, *late):
            self.check_loaded(self.loads[0], *answer)
            self.loads.popleft()
        known += [version for version, _ in in_time]
        if not rollouts.versions() <= set(known):
            raise TransferError(
                f"a request must be sampled by version {' or '.join(map(str, known))}, the last loaded "
                f"before each token, got version {', '.join(map(str, sorted(rollouts.versions())))}"
            )
        return rollouts

    def check(self) -> None:
        """Raise RunError if weights could not be sent to the process."""
        self.store.check()

    def stop(self) -> None:
        """End the process and abandon all transfers of weights to the process."""
        super().stop()
        self.store.forget()
