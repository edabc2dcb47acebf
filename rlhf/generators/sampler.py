"""The interface of a sampler: a model in a generator process that samples and loads new weights.

`rlhf.generators.worker.WorkerGenerator` starts the process and calls one method of the sampler at a time:

    factory.build() -> load(manifest) -> sample(...) -> sample(...) -> load(manifest) -> ... -> close()

There is always a `load` before the first `sample`. On the trainer's GPU there is a `load` before every
`sample`, because vLLM discards the weights afterwards. With `schedule.update=in_flight`, `sample` itself may
cause further calls of `load`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.generators.transfer.weights import Manifest


class Sampler(Protocol):
    """A model that answers prompts with the weights of the last load."""

    def sample(
        self, prompts: Prompts, sampling: Sampling, update: Callable[[], int] | None = None
    ) -> Rollouts:
        """Return K responses to each prompt, with the log-probs of their tokens.

        Args:
            prompts: the prompts, as token ids on the CPU.
            sampling: number of samples, temperature and response length of the request.
            update: with in-flight updates, a function to call before every forward pass. The function calls
                `load` if there are newer weights, and returns the version that samples the next tokens. The
                key-value cache of earlier tokens is not recomputed (PipelineRL, Piche et al., arXiv
                2509.19128).

        Returns:
            Rollouts [N, K, T] on the CPU, T = `sampling.response_length`. Log-probs are at
            `sampling.temperature`, by the weights that sampled each token. With `update`, the rollouts have
            `token_versions`. The caller adds `version` and `generate_s`.
        """

    def load(self, manifest: Manifest) -> dict[str, int]:
        """Load the weights that the manifest describes, and discard caches computed with previous weights.

        A cache that a running request uses is not discarded before the request ends.

        Returns:
            Checksums of the loaded tensors by name, which the trainer compares with the checksums of the
            tensors that it sent: `transfer.weights.checksum`, or `transfer.gpu.fingerprint` for weights on a
            GPU.

        Raises:
            TransferError: the weights differ from the weights that the trainer sent.
        """

    def close(self) -> None:
        """Release all resources of the sampler."""


class SamplerFactory(Protocol):
    """A factory that creates a sampler in the generator process.

    The factory is pickled and sent to the process. So it is a dataclass of plain values, and only `build`
    imports what the sampler needs.
    """

    def build(self) -> Sampler:
        """Create the sampler.

        Raises:
            UserError, RunError: no sampler can be created with the values of the factory; the run ends.
        """
