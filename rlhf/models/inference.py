"""Outputs of a model on a batch of rollouts, without gradient, in micro-batches formed by length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.core.batch import microbatches, moved_to
from rlhf.models.precision import autocast

if TYPE_CHECKING:
    from rlhf.config.model import Dtype
    from rlhf.core.batch import Budget, Rollouts
    from rlhf.processes.ranks import Ranks


def infer(
    module: nn.Module,
    rollouts: Rollouts,
    field: str,
    budget: Budget,
    ranks: Ranks,
    dtype: Dtype,
    done: Callable[[int], None] | None = None,
) -> Tensor:
    """Return one output of `module` for all rollouts.

    Each rank computes a part of the rollouts. Every rank returns the result for all rollouts.

    Args:
        module: a module that maps rollouts to `Outputs`.
        rollouts: N prompts with K responses of at most T tokens; all ranks pass the same rollouts.
        field: name of the output: "logprobs", "values" or "rewards".
        budget: the limits of one forward on one rank.
        ranks: the ranks that divide the rollouts; the forwards run on `ranks.device`.
        dtype: dtype of the forwards; a 16-bit dtype uses autocast.
        done: function to call with the number of sequences after each forward; the last forward may repeat
            sequences, so that all ranks make the same number of forwards.

    Returns:
        float32 on the device of `rollouts`: log-probs [N, K, T], values [N, K, T+1] or rewards [N, K].
        Positions beyond the longest response of a micro-batch are 0.
    """
    home = rollouts.response_ids.device
    whole: Tensor | None = None
    # Not inference_mode: weights that ZeRO-3 gathers in inference mode cannot be trained later.
    with torch.no_grad(), autocast(ranks.device, dtype):
        for rows, micro, counts in microbatches(rollouts, budget, ranks.rank, ranks.size):
            out = getattr(module(micro.to(ranks.device)), field).float()
            if whole is None:
                shape = list(rollouts.response_ids.shape[: out.dim()])
                if out.dim() == 3:  # T log-probs, or T+1 values
                    shape[2] += out.shape[2] - micro.response_ids.shape[2]
                whole = torch.zeros(shape, dtype=torch.float32, device=ranks.device)
            rows = moved_to(ranks.device, rows)
            if counts and out.dim() == 3:
                whole[rows, :, : out.shape[2]] = out
            elif counts:
                whole[rows] = out
            if done is not None:
                done(len(rows) * rollouts.response_ids.shape[1])
    assert whole is not None, "infer needs at least one prompt"
    return ranks.sum(whole).to(home)  # one copy, so that micro-batches do not wait for one another
