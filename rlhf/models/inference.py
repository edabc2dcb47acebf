"""A model's outputs on any number of rollouts, without gradient, in micro-batches by length."""

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
    """The output `field` of `module`, float32, where `rollouts` are: [N, K, T], [N, K, T+1] or [N, K].

    Positions beyond a micro-batch's longest response are 0. Ranks divide the rollouts, and each gets all.
    """
    home = rollouts.response_ids.device
    whole: Tensor | None = None
    # Not inference_mode: the weights that ZeRO-3 gathers under it could not be trained afterwards.
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
    assert whole is not None, "there were no rollouts"
    return ranks.sum(whole)
