"""Sampling with the trainer's own model, in its process, at the moment of the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.batch import Prompts, Rollouts
from rlhf.generators.generator import Sampling, finished
from rlhf.generators.sampling import sample, uniforms
from rlhf.seeding import derive


class HFGenerator:
    """The policy itself as generator.

    A request is sampled when it is submitted, by the weights as they are then; that is the
    first-in-first-out order of requests and loads. `load` therefore has nothing to copy: the trainer's
    weights are the generator's.

    Args:
        borrow: gives the model for the time of a request (`engine.borrow_policy`).
        tokenizer: for the ids of stop and pad tokens.
        batch_size: sequences decoded at once.
        seed: of the run.
    """

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[PreTrainedModel]],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        seed: int,
    ) -> None:
        self.borrow = borrow
        self.stop_ids = [tokenizer.eos_token_id]
        self.pad_id = tokenizer.pad_token_id
        self.batch_size = batch_size
        self.seed = seed
        self.version = 0

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Sample now, in chunks of `batch_size` sequences."""
        start = time.perf_counter()
        seed = derive(self.seed, "sample", sampling.purpose)
        chunk = max(1, self.batch_size // sampling.samples)
        numbers = uniforms(seed, sampling.request, prompts.index, sampling.samples, sampling.response_length)
        parts = []
        with self.borrow() as model:
            for first in range(0, len(prompts), chunk):
                rows = slice(first, first + chunk)
                parts.append(
                    sample(
                        model,
                        prompts.prompt_ids[rows].to(model.device),
                        prompts.prompt_mask[rows].to(model.device),
                        samples_per_prompt=sampling.samples,
                        response_length=sampling.response_length,
                        temperature=sampling.temperature,
                        uniforms=numbers[rows],
                        stop_ids=self.stop_ids,
                        pad_id=self.pad_id,
                    )
                )
        home, length = prompts.prompt_ids.device, sampling.response_length
        fill = (self.pad_id, False, 0.0)
        ids, mask, logprobs = (
            torch.cat([pad_to(part[i], length, fill[i]) for part in parts]).to(home) for i in range(3)
        )
        return finished(
            prompts.extend(
                Rollouts,
                response_ids=ids,
                response_mask=mask,
                behaviour_logprobs=logprobs,
                ended=torch.cat([part[3] for part in parts]).to(home),
                version=self.version,
                generate_s=time.perf_counter() - start,
            )
        )

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take note of the version that the borrowed weights now have."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""


def pad_to(x: Tensor, length: int, value: float) -> Tensor:
    """`x` [..., T] padded on the right with `value` to [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)
