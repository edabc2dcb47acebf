"""What the process of a generator serves: a sampler, and which version of the weights it holds.

Only a `load` may come before the answer to a `sample` (`schedule.update=in_flight`): where it comes in time
it is answered with it, else after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.generators.transfer.shared_memory import remove
from rlhf.processes.service import Service

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.generators.sampler import Sampler, SamplerFactory
    from rlhf.generators.transfer.weights import Manifest
    from rlhf.processes.service import Channel


@dataclass(frozen=True, slots=True)
class SamplingFactory:
    """Makes the service around the sampler of `factory`."""

    factory: SamplerFactory

    def build(self, channel: Channel) -> SamplingService:
        """Make the sampler, too."""
        return SamplingService(self.factory.build(), channel)


class SamplingService(Service):
    """What the trainer can ask of the process of a generator."""

    def __init__(self, sampler: Sampler, channel: Channel) -> None:
        self.sampler = sampler
        self.channel = channel
        self.version: int | None = None  # of the weights that the sampler holds
        self.paths: set[str] = set()  # of the trainer's shared files

    def load(self, manifest: Manifest) -> tuple[int, dict[str, int]]:
        """Take weights over; returns their version and checksums, for the trainer to compare."""
        if manifest.path:
            self.paths.add(manifest.path)
        self.version = None
        taken = self.sampler.load(manifest)
        self.version = manifest.version
        return manifest.version, taken

    def sample(
        self, prompts: Prompts, sampling: Sampling, in_flight: bool
    ) -> tuple[Rollouts, list[tuple[int, dict[str, int]]]]:
        """Answer prompts with the weights that the sampler holds, and say which and how long it took.

        In flight, weights that come meanwhile are taken over; returns also what `load` answered to each.
        """
        assert self.version is not None, "weights come before requests"
        loads: list[tuple[int, dict[str, int]]] = []

        def update() -> int:
            while self.channel.pending():
                method, arguments = self.channel.receive()
                assert method == "load", "nothing else overtakes a request"
                loads.append(self.load(*arguments))
            assert self.version is not None
            return self.version

        start = time.perf_counter()
        rollouts = self.sampler.sample(prompts, sampling, update if in_flight else None)
        seconds = time.perf_counter() - start
        rollouts = replace(rollouts, version=self.version, generate_s=seconds)
        return replace(rollouts, version=min(rollouts.versions())), loads

    def close(self) -> None:
        """Release what the sampler holds."""
        self.sampler.close()

    def orphaned(self) -> None:
        """Remove the trainer's shared files."""
        for path in self.paths:
            remove(path)
