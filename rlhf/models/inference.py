"""Outputs of a model on a batch of rollouts, without gradient, in micro-batches formed by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.core.batch import microbatches
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Rollouts
    from rlhf.processes.ranks import Ranks


def infer(
    module: nn.Module, rollouts: Rollouts, field: str, micro_batch: int, ranks: Ranks, dtype: Dtype
) -> Tensor:
    """Return one output of `module` for all rollouts.

    The ranks divide the rollouts among themselves, and every rank returns the whole result.

    Args:
        module: a module that maps rollouts to `Outputs`.
        rollouts: N prompts with K responses of at most T tokens, the same on every rank.
        field: name of the output: "logprobs", "values" or "rewards".
        micro_batch: most sequences of one forward on one rank; a micro-batch has at least one prompt.
        ranks: the ranks that divide the rollouts; their device runs the forwards.
        dtype: dtype of the forwards (autocast below float32).

    Returns:
        float32 on the device of `rollouts`: log-probs [N, K, T], values [N, K, T+1] or rewards [N, K].
        Positions beyond the longest response of a micro-batch are 0.
    """
    home = rollouts.response_ids.device
    whole: Tensor | None = None
    # inference_mode would break ZeRO-3: weights that it gathers there cannot be trained afterwards.
    with torch.no_grad(), autocast(ranks.device, dtype):
        for rows, micro, counts in microbatches(rollouts, micro_batch, ranks.rank, ranks.size):
            out = getattr(module(micro.to(ranks.device)), field).float().to(home)
            if whole is None:
                shape = list(rollouts.response_ids.shape[: out.dim()])
                if out.dim() == 3:  # T positions, or T+1 states
                    shape[2] += out.shape[2] - micro.response_ids.shape[2]
                whole = torch.zeros(shape, dtype=torch.float32, device=home)
            if counts and out.dim() == 3:
                whole[rows, :, : out.shape[2]] = out
            elif counts:
                whole[rows] = out
    assert whole is not None, "infer needs at least one prompt"
    return ranks.sum(whole)
