"""What lives in a generator's own process: a model that samples, and takes new weights over.

The process is made by `rlhf.generators.worker.WorkerGenerator`, which asks one thing at a time:

    factory.build() -> load(manifest) -> sample(...) -> sample(...) -> load(manifest) -> ... -> close()

There is always a `load` before the first `sample`. With `schedule.update=in_flight` a `sample` calls for
further `load`s in its course.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.generators.transfer.weights import Manifest


class Sampler(Protocol):
    """Answers prompts with the weights that it was given last."""

    def sample(
        self, prompts: Prompts, sampling: Sampling, update: Callable[[], int] | None = None
    ) -> Rollouts:
        """K responses to each prompt, with the log-probs of their tokens at `sampling.temperature`: token ids
        in and out, tensors on the CPU, T = `sampling.response_length`. The caller adds version and seconds.

        With `update` weights change in flight: it is called before every forward, calls `load` where there
        are newer weights, and returns the version that samples from here on. What was computed of the tokens
        before, the key-value cache, is kept (PipelineRL, Piche et al., arXiv 2509.19128), log-probs are those
        at which each token was sampled, and the answer has `token_versions`.
        """

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Take the weights over (`transfer.read`); what was computed with those before is forgotten, but for
        what a request that is running needs.

        Returns the checksums (`transfer.checksum`; of what came from a GPU `gpu_transfer.fingerprint`) by
        tensor name of what was taken, which the trainer compares with what it sent.

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
