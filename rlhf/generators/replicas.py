"""Several generators of one kind, each in a process of its own, which take the requests for training in turn.

    request t ──▶ replica t mod n ──▶ rollouts t
    load      ──▶ shared memory, one snapshot for all; a replica takes it over ahead of its next request

Each replica works first in, first out, and before a request it is given the weights of the last load, if it
has not got them yet. So a request is sampled by the version that one generator would have sampled it by, and
a load costs as much as with one: a replica takes over the versions of its own requests alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from rlhf.core.metrics import merge
from rlhf.generators.generator import Generator
from rlhf.generators.transfer.shared_memory import SharedWeights
from rlhf.generators.worker import WorkerGenerator
from rlhf.processes.worker import Job

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.core.metrics import Metrics
    from rlhf.generators.transfer.weights import Manifest


class Replica(WorkerGenerator):
    """One of them. It takes weights over from the store that all have, which is not its own to close."""

    store: SharedWeights
    given: Manifest | None = None  # the weights that it was given last

    def take(self, manifest: Manifest) -> None:
        """Take weights over that are in the store, where they are not those it was given last.

        Raises:
            RunError: the generator failed since the last call.
        """
        if manifest is not self.given:
            self.store.hold(manifest)
            self.given = manifest
            self.put(Job("load", (manifest,)))

    def close(self) -> None:
        """End the process."""
        super(WorkerGenerator, self).close()


class Replicas(Generator):
    """Answers the requests for training in turn, and any other by the replica that has the least to do.

    Args:
        start: starts replica i, which takes weights over from the given store.
        count: how many.
        in_flight: loads overtake requests: all replicas are given each at once.
    """

    def __init__(self, start: Callable[[int, SharedWeights], Replica], count: int, in_flight: bool) -> None:
        self.store = SharedWeights()
        self.replicas = [start(i, self.store) for i in range(count)]
        self.in_flight = in_flight
        self.latest: Manifest | None = None  # the weights of the last load

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Ask for K responses to each prompt; returns at once.

        Raises:
            RunError: the replica whose turn it is failed since it was last asked.
        """
        assert self.latest is not None, "weights come before requests"
        if sampling.purpose == "train":
            replica = self.replicas[sampling.request % len(self.replicas)]
        else:
            replica = min(self.replicas, key=lambda replica: replica.unanswered)
        replica.take(self.latest)
        return replica.submit(prompts, sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights, once; each replica takes them over ahead of its next request, in flight at once.

        Raises:
            RunError: there is not enough memory; in flight, a replica failed since the last call.
        """
        before, self.latest = self.latest, self.store.write(weights, version)
        if before is not None:
            self.store.release(before)
        if self.in_flight:
            for replica in self.replicas:
                replica.take(self.latest)

    def figures(self) -> Metrics:
        """Those of all replicas together."""
        together: Metrics = {}
        for replica in self.replicas:
            merge(together, replica.figures())
        return together

    def close(self) -> None:
        """End the processes, then give the memory back."""
        with ExitStack() as ends:
            ends.callback(self.store.close)
            for replica in self.replicas:
                ends.callback(replica.close)
