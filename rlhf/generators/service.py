"""The service of a generator process: a sampler and the version of its weights.

With `schedule.update=in_flight`, a `load` may arrive while a `sample` runs. If the load is executed during
the sample, the answer to the load is part of the answer to the sample. Otherwise the load is answered after
the sample.
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
    """A factory of the service of a generator process, with the sampler that `factory` creates."""

    factory: SamplerFactory

    def build(self, channel: Channel) -> SamplingService:
        """Create the sampler and its service."""
        return SamplingService(self.factory.build(), channel)


class SamplingService(Service):
    """A service with the methods of a generator process that the trainer calls.

    Args:
        sampler: the sampler of the process.
        channel: the connection to the trainer, on which loads arrive during a sample.
    """

    def __init__(self, sampler: Sampler, channel: Channel) -> None:
        self.sampler = sampler
        self.channel = channel
        self.version: int | None = None  # version of the weights; None until a load has ended
        self.paths: set[str] = set()  # paths of the trainer's shared files

    def load(self, manifest: Manifest) -> tuple[int, dict[str, int]]:
        """Load weights into the sampler, and return their version and checksums.

        Raises:
            TransferError: the weights differ from the weights that the trainer sent.
        """
        if manifest.path:
            self.paths.add(manifest.path)
        self.version = None
        checksums = self.sampler.load(manifest)
        self.version = manifest.version
        return manifest.version, checksums

    def sample(
        self, prompts: Prompts, sampling: Sampling, in_flight: bool
    ) -> tuple[Rollouts, list[tuple[int, dict[str, int]]]]:
        """Return rollouts for the prompts, and the answers to the loads that were executed during sampling.

        Args:
            prompts: the prompts.
            sampling: number of samples, temperature and response length of the request.
            in_flight: whether a load that arrives during the request is executed before the next forward
                pass.

        Returns:
            The rollouts with `version` and `generate_s`, and the result of `load` for each executed load
            (none without `in_flight`).
        """
        assert self.version is not None, "load weights before the first request"
        loads: list[tuple[int, dict[str, int]]] = []

        def update() -> int:
            while self.channel.pending():
                method, arguments = self.channel.receive()
                assert method == "load", "only a load may overtake a request"
                loads.append(self.load(*arguments))
            assert self.version is not None
            return self.version

        start = time.perf_counter()
        rollouts = self.sampler.sample(prompts, sampling, update if in_flight else None)
        seconds = time.perf_counter() - start
        rollouts = replace(rollouts, version=self.version, generate_s=seconds)
        return replace(rollouts, version=min(rollouts.versions())), loads

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()

    def orphaned(self) -> None:
        """Remove the trainer's shared files, because the trainer has ended."""
        for path in self.paths:
            remove(path)
