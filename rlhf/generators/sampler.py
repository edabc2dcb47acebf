"""What lives in a generator's own process: a model that samples, and takes new weights over.

The process is made by `rlhf.generators.worker.WorkerGenerator`, which asks one thing at a time:

    factory.build() -> load(manifest) -> sample(...) -> sample(...) -> load(manifest) -> ... -> close()

There is always a `load` before the first `sample`.
"""

from __future__ import annotations

from typing import Protocol

from rlhf.batch import Prompts, Rollouts
from rlhf.generators.generator import Sampling
from rlhf.generators.transfer import Manifest


class Sampler(Protocol):
    """Answers prompts with the weights that it was given last."""

    def sample(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """K responses to each prompt, with the log-probs of their tokens at `sampling.temperature`: token ids
        in and out, tensors on the CPU, T = `sampling.response_length`. The caller adds version and seconds.
        """

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Take the weights over (`transfer.read`); what was computed with those before is forgotten.

        Returns the checksums (`transfer.checksum`) by tensor name of what was taken, which the trainer
        compares with what it sent.

        Raises:
            TransferError: they did not arrive as they were sent.
        """

    def close(self) -> None:
        """Release what is held."""


class SamplerFactory(Protocol):
    """Makes a sampler in the process where it is to live. Goes there through pickle, so it is a dataclass of
    plain values, and `build` alone imports what the sampler needs.
    """

    def build(self) -> Sampler:
        """Make the sampler. Settings that cannot work raise UserError or RunError, which end the run."""
