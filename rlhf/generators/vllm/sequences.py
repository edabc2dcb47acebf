"""Requests to vLLM: when their sequences start, their parameters, and their outputs as tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.core.errors import RunError

if TYPE_CHECKING:
    from vllm import LLM


class Request(NamedTuple):
    """A request to vLLM: a prompt, and how to sample after it."""

    owner: int  # number of the prompt, sample or episode that gets the output
    ids: list[int]
    parameters: Any  # vLLM's sampling parameters


def serve(
    llm: LLM,
    source: Callable[[bool], Iterable[Request]],
    sink: Callable[[int, Any], None],
    update: Callable[[], int] | None,
) -> None:
    """Let vLLM sample all requests of a source. After an error, vLLM has none of them.

    With in-flight updates, a sequence is sent to vLLM only when its prompt fits into the next step, so that
    it never reads prompt keys that older weights computed: the version is part of the keys of the prefix
    cache (`cache_salt`). Prompts that do not fit into a step beside `max_num_seqs` sequences are encoded in
    several steps, between which the weights may change.

    Args:
        llm: vLLM.
        source: returns new requests; called before every step. With True, nothing is left to sample: the
            source waits for new requests, and returns none at the end.
        sink: takes the owner of a request and its output, as soon as vLLM has sampled it.
        update: function that may load newer weights; called before every step. Requests must have one sample
            each then.

    Raises:
        RunError: source, sink or `update` fail; or, without `update`, a token was sampled by a version other
            than the version loaded last.
    """
    from vllm import TokensPrompt

    engine, waiting, owners = llm.llm_engine, deque[Request](), dict[str, int]()
    most = most_tokens = longest = math.inf  # sequences, tokens and tokens of a prompt in a step of vLLM
    pending: float = 0  # prompt tokens of started sequences that the next step does not encode
    if update is not None:
        limits = engine.vllm_config.scheduler_config
        most, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        longest = most_tokens - most
    try:
        while True:
            idle = not waiting and not owners
            waiting += source(idle)
            if idle and not waiting:
                return
            if update is not None:
                update()
            running = engine.get_num_unfinished_requests()
            tokens = most_tokens - running - pending
            started = next_sequences(waiting, most - running, tokens, longest)
            pending = max(0, sum(len(each.ids) for each in started) - tokens)
            if started:
                salt = llm.get_weight_version()
                sent = llm.enqueue(
                    [TokensPrompt(prompt_token_ids=each.ids, cache_salt=salt) for each in started],
                    [each.parameters for each in started],
                    use_tqdm=False,
                )
                # vLLM adds random letters to the ids that its outputs have
                owners |= {id.partition("-")[0]: each.owner for id, each in zip(sent, started, strict=True)}
            for output in engine.step():
                if update is None:
                    _check_versions(output, llm.get_weight_version())
                sink(owners.pop(output.request_id), output)
    except RunError:
        engine.abort_request(list(owners))
        raise


def _check_versions(output: Any, version: str) -> None:
    """Raise RunError if another version of the weights sampled tokens of an output."""
    for completion in output.outputs:
        for span in completion.weight_versions or []:
            if span.version != version:
                raise RunError(
                    f"tokens must be sampled by version {version} (the version loaded last), "
                    f"got tokens of version {span.version}"
                )


def next_sequences(waiting: deque[Request], count: float, tokens: float, longest: float) -> list[Request]:
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
