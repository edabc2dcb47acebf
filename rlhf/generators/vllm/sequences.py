"""Requests to vLLM: when their sequences start, their parameters, and their outputs as tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.core.batch import Rollouts
from rlhf.core.errors import RunError
from rlhf.core.seeding import derive

if TYPE_CHECKING:
    from vllm import LLM

    from rlhf.core.batch import Prompts, Sampling


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


def sampling_parameters(
    sampling: Sampling, example: int, stop_ids: Iterable[int], seed: int
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for the samples of a prompt; sample k uses the seed + k.

    Args:
        sampling: the settings of the request.
        example: the row of the prompt in the data.
        stop_ids: tokens that end a response.
        seed: the seed of the run.
    """
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.response_length,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # stop only at stop_token_ids, not at the end token of the model's config
        "seed": derive(seed, "sample", sampling.purpose, sampling.request, example),
        "logprobs": 0,  # log-probs of the sampled token only
        "detokenize": False,
    }


def single_samples(parameters: Any) -> Iterator[Any]:
    """Yield vLLM's sampling parameters for each of the n samples of a prompt, as vLLM derives them."""
    for k in range(parameters.n):
        one = parameters.clone()
        one.n, one.seed = 1, parameters.seed + k
        yield one


def seed_of(seed: int, sample: int, turn: int) -> int:
    """Return the seed of a reply of an episode; the first one has that of a response.

    Args:
        seed: of `sampling_parameters`.
        sample: the number of the sample, from 0.
        turn: the number of the reply, from 0.
    """
    return derive(seed, sample, turn) if turn else seed + sample


def rollouts_of(
    prompts: Prompts,
    sampling: Sampling,
    replies: Sequence[Sequence[Any]],
    versions: Sequence[Sequence[int]] | None,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Rollouts:
    """Return replies as rollouts [N, K, T].

    Args:
        prompts: N prompts.
        sampling: K and T.
        replies: token ids and log-probs of each of the N K replies, and perhaps more.
        versions: of the weights that sampled each of their tokens; None: the tokens have no versions.
        stop_ids: tokens that end a reply.
        pad_id: token id of padding.
    """
    shape = len(prompts), sampling.samples, sampling.response_length
    ids, mask, logprobs = (x.view(shape) for x in pad(replies, shape[-1], pad_id))
    token_versions = None
    if versions is not None:
        token_versions = torch.zeros(shape, dtype=torch.int64)
        token_versions[mask] = torch.tensor([version for each in versions for version in each])
    return prompts.extend(
        Rollouts,
        response_ids=ids,
        response_mask=mask,
        behaviour_logprobs=logprobs,
        ended=(mask & torch.isin(ids, torch.tensor(stop_ids))).any(-1),
        token_versions=token_versions,
    )


def pad(replies: Sequence[Sequence[Any]], length: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return replies (token ids, log-probs, ...) as ids, mask and log-probs, each [replies, length]."""
    ids = torch.full((len(replies), length), pad_id)
    logprobs = torch.zeros(len(replies), length)
    lengths = torch.tensor([len(reply[0]) for reply in replies])
    mask = torch.arange(length) < lengths[:, None]
    ids[mask] = torch.tensor([token for reply in replies for token in reply[0]])
    logprobs[mask] = torch.tensor([x for reply in replies for x in reply[1]])
    return ids, mask, logprobs


def versions(completion: Any) -> list[int]:
    """Return the version of the weights that sampled each token, as reported by vLLM."""
    return [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]
