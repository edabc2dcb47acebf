"""Sampling parts of responses with the trained model, as a virtual clock asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.core.batch import moved_to
from rlhf.core.phases import Phases
from rlhf.core.seeding import derive
from rlhf.generators.hf.sampling import sample, uniforms

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedModel

    from rlhf.core.batch import Sampling
    from rlhf.generators.hf.sampling import HFSettings


class HFParts:
    """The trained model as a sampler of parts of responses.

    Keys and values of earlier tokens are computed again, so a token has the log-prob that the present weights
    give it after all tokens before it.

    Args:
        borrow: returns a context that yields the trained model (`engine.borrow_policy`).
        settings: the settings of sampling.
        phases: the phases of the run, for its progress display.
    """

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[PreTrainedModel]],
        settings: HFSettings,
        phases: Phases | None = None,
    ) -> None:
        self.borrow, self.settings, self.phases = borrow, settings, phases or Phases()
        self.pad_id = settings.pad_id

    def numbers(self, sampling: Sampling, index: Tensor) -> Tensor:
        """Return the uniform numbers [N, K, T] of a request, given the rows [N] of its prompts."""
        seed = derive(self.settings.seed, "sample", sampling.purpose)
        return uniforms(seed, sampling.request, index, sampling.samples, sampling.response_length)

    def extend(
        self, ids: Tensor, mask: Tensor, numbers: Tensor, most: Tensor | None, temperature: float
    ) -> list[list[tuple[list[int], list[float], bool]]]:
        """Sample K continuations of each row of tokens, in chunks of sequences, the longest rows first."""
        settings, (n, k, length) = self.settings, numbers.shape
        found: list[list[tuple[list[int], list[float], bool]]] = [[] for _ in range(n)]
        order = mask.sum(1).argsort(descending=True, stable=True)
        with self.borrow() as model, self.phases("sampling", n * k) as done:
            for rows in order.split(max(1, settings.batch_size // k)):
                with self.phases("token", length) as next_token:
                    tokens, real, logprobs, ended = sample(
                        model,
                        moved_to(model.device, ids[rows]),
                        moved_to(model.device, mask[rows]),
                        samples_per_prompt=k,
                        response_length=length,
                        temperature=temperature,
                        uniforms=numbers[rows],
                        stop_ids=settings.stop_ids,
                        pad_id=settings.pad_id,
                        after_token=next_token,
                        cached=settings.cached,
                        noise=settings.noise,
                        most=None if most is None else most[rows],
                    )
                counts = real.sum(-1).tolist()
                values = (tokens.tolist(), logprobs.tolist(), ended.tolist())
                for i, row in enumerate(rows.tolist()):
                    found[row] = [
                        (values[0][i][j][:count], values[1][i][j][:count], values[2][i][j])
                        for j, count in enumerate(counts[i])
                    ]
                done(len(rows) * k)
        return found
