"""Comparison of sampling with a forward of each sampled sequence alone.

The log-probs that `sample` returns come from a batch with padding, from a cache, and on a GPU from a CUDA
graph. The plain forward of a sequence has none of these. `rlhf.models.agreement` explains why the difference
is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.core.batch import Rollouts
from rlhf.generators.hf.sampling import sample
from rlhf.models.agreement import is_exact, why_not
from rlhf.models.modules import backbone, logit_scale


def sampling_fault(model: PreTrainedModel, batch: Rollouts, cached: bool = True) -> str | None:
    """Return why the log-probs of sampled tokens are wrong, or None if they are right.

    Args:
        model: the causal LM, whose forward of a sequence alone works.
        batch: prompts, and responses whose number and length are used.
        cached: the argument of `sample`.
    """
    _, count, length = batch.response_ids.shape
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(batch.response_ids.shape, dtype=torch.float64, generator=draw)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        ids, _, logprobs, _ = sample(
            model,
            batch.prompt_ids,
            batch.prompt_mask,
            samples_per_prompt=count,
            response_length=length,
            temperature=1.0,
            uniforms=numbers,
            stop_ids=[],
            pad_id=0,
            cached=cached,
        )
        for i in range(len(ids)):
            for j in range(count):
                yield logprobs[i, j], alone(model, batch.prompt_ids[i][batch.prompt_mask[i]], ids[i, j])

    return why_not(pairs, is_exact(model))


def alone(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the log-probs [T] of a response [T] to a prompt [P], from one forward without padding."""
    states = backbone(model)(input_ids=torch.cat([prompt, response])[None], use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(states[:, len(prompt) - 1 : -1]) * logit_scale(model)
    return logits[0].float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
