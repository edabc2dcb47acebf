"""Generator replicas: several generator processes that answer the training requests in turn.

    request t ──▶ replica t mod n ──▶ rollouts t
    load      ──▶ shared memory, one snapshot for all replicas; each loads it before its next request

Each replica processes its jobs first in, first out. Before a request, the replica loads the latest weights
unless it has already loaded them. So each request is sampled by the same version as with a single generator.
A load costs the trainer as much as with a single generator, and a replica loads only the versions that its
requests need. The store keeps at most two versions per replica (`most_versions`), regardless of
`schedule.max_lag`; if it keeps more, a load waits until a replica has loaded a version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.core.metrics import merge
from rlhf.generators.generator import Generator
from rlhf.generators.transfer.kept_versions import most_versions
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.worker import WorkerGenerator
from rlhf.processes.worker import Job

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.generators.transfer.weights import Manifest


class Replica(WorkerGenerator):
    """A generator process that shares its weight snapshots with the other replicas.

    The store of snapshots belongs to `Replicas`, which closes the store.
    """

    store: SharedWeights
    given: Manifest | None = None  # the manifest of the last call of `take`

    def take(self, manifest: Manifest) -> None:
        """Queue a load of the weights of `manifest`, unless the last call had the same manifest.

        The weights must be in the shared store.

        Raises:
            RunError: the generator failed since the last call.
        """
        if manifest is not self.given:
            self.store.hold(manifest)
            self.given = manifest
            self.put(Job("load", (manifest,)))

    def close(self) -> None:
        """End the process; the shared store stays open."""
        super(WorkerGenerator, self).close()


class Replicas(Generator):
    """A generator that distributes requests over replicas.

    Training requests go to the replicas in turn. Any other request goes to the replica with the fewest
    unfinished jobs.

    Args:
        start: starts and returns replica i, given i and the store from which the replica loads weights.
        count: number of replicas, at least 2.
        in_flight: whether loads overtake requests; if True, every replica gets every load immediately.
        store: the store of all replicas; None: a store that keeps the dtypes of the weights.
    """

    def __init__(
        self,
        start: Callable[[int, SharedWeights], Replica],
        count: int,
        in_flight: bool,
        store: SharedWeights | None = None,
    ) -> None:
        self.store = store or SharedWeights()
        self.replicas = [start(i, self.store) for i in range(count)]
        self.in_flight = in_flight
        self.latest: Manifest | None = None  # the manifest of the last load

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt, without waiting for them.

        Raises:
            RunError: the replica that gets the request has failed.
        """
        assert self.latest is not None, "load weights before the first request"
        if sampling.purpose == "train":
            replica = self.replicas[sampling.request % len(self.replicas)]
        else:
            replica = min(self.replicas, key=lambda replica: replica.unanswered)
        replica.take(self.latest)
        return replica.submit(prompts, sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights into shared memory once; each replica loads the copy before its next request.

        With `in_flight`, every replica gets the load immediately.

        Raises:
            RunError: there is not enough memory, or a replica has failed.
        """
        if self.latest is not None:
            self.store.release(self.latest)
        self.wait()
        self.latest = self.store.write(weights, version)
        if self.in_flight:
            for replica in self.replicas:
                replica.take(self.latest)

    def wait(self) -> None:
        """Wait until the store keeps fewer than `most_versions` versions.

        Raises:
            RunError: a replica has failed.
        """
        self.store.wait(most_versions(len(self.replicas), self.in_flight), self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of the first replica that has failed, if any."""
        for replica in self.replicas:
            replica.raise_failure()

    def figures(self) -> Metrics:
        """Return the merged metrics of all replicas."""
        merged: Metrics = {}
        for replica in self.replicas:
            merge(merged, replica.figures())
        return merged

    def close(self) -> None:
        """End the processes, then free the shared memory."""
        with ExitStack() as ends:
            ends.callback(self.store.close)
            for replica in self.replicas:
                ends.callback(replica.close)
