"""The trial of sampling with a cache (`generator=hf`), by the log-probs of the sampled tokens.

The log-probs that `sample` returns come from a batch with padding, from a cache, and on a GPU from a CUDA
graph. They are compared with a plain forward of each sequence alone, which has none of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.core.batch import Rollouts
from rlhf.generators.hf.sampling import sample
from rlhf.models.modules import backbone, logit_scale
from rlhf.trials.agreement import is_exact, once, why_not

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.processes.ranks import Ranks

log = logging.getLogger(__name__)


def samples_with_cache(
    model: PreTrainedModel,
    cfg: Config,
    ranks: Ranks,
    borrow: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> bool:
    """Return whether the Hugging Face sampler can use a cache with a causal LM; if not, warn.

    Args:
        model: the causal LM, whole or divided over the ranks.
        cfg: the config of the run.
        ranks: the ranks of the run, which all call this function.
        borrow: returns a context that yields this model, whole and on the device of the rank; None: it is.
    """
    fault, new = once("sampling", model, cfg, ranks, sampling_fault, borrow)
    if fault is not None and new:
        log.warning(
            f"sampling from a {model.config.model_type} model uses no cache ({fault}): every token takes a "
            "forward of the whole sequence, which is slow; generator=vllm is faster if vLLM has this model"
        )
    return fault is None


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
                yield logprobs[i, j], _alone(model, batch.prompt_ids[i][batch.prompt_mask[i]], ids[i, j])

    return why_not(pairs(), is_exact(model))


def _alone(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the log-probs [T] of a response [T] to a prompt [P], from one forward without padding."""
    states = backbone(model)(input_ids=torch.cat([prompt, response])[None], use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(states[:, len(prompt) - 1 : -1]) * logit_scale(model)
    return logits[0].float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
