"""The sequences of a request to vLLM: when they start, their parameters, and their results as tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Request(NamedTuple):
    """A request to vLLM: a prompt, and how to sample after it."""

    owner: int  # number of the prompt, sample or episode that gets the output
    ids: list[int]
    parameters: Any  # vLLM's sampling parameters


def next_sequences(waiting: deque[Request], count: int, tokens: float, longest: float) -> list[Request]:
    """Remove from `waiting` the sequences that vLLM starts in its next step, and return them.

    Args:
        waiting: the sequences in their order.
        count: the largest number of sequences.
        tokens: the largest number of prompt tokens of all sequences together.
        longest: the largest number of tokens of a prompt that is encoded in one step. A longer prompt does
            not wait until all its tokens fit into the step.
    """
    found: list[Request] = []
    while waiting and len(found) < count and tokens > 0:
        length = len(waiting[0].ids)
        if tokens < length <= longest:
            break
        found.append(waiting.popleft())
        tokens -= length
    return found


def single_samples(parameters: Any) -> Iterator[Any]:
    """Yield vLLM's sampling parameters for each of the n samples of a prompt, as vLLM derives them."""
    for k in range(parameters.n):
        one = parameters.clone()
        one.n, one.seed = 1, parameters.seed + k
        yield one


def pad(completions: list[Any], length: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, mask and log-probs of vLLM's completions, each [completions, length] padded right."""
    ids = torch.full((len(completions), length), pad_id)
    logprobs = torch.zeros(len(completions), length)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    mask = torch.arange(length) < lengths[:, None]
    ids[mask] = torch.tensor([token for completion in completions for token in completion.token_ids])
    logprobs[mask] = torch.tensor([x for completion in completions for x in completion.logprobs.logprobs])
    return ids, mask, logprobs


def versions(completion: Any) -> list[int]:
    """Return the version of the weights that sampled each token, as reported by vLLM."""
    return [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]
