"""KL-Cov and Clip-Cov: limits on the few tokens that lower the entropy of the policy most.

Cui et al., arXiv 2505.22617.

    cov_t = (A_t - mean A) (logp_t - mean logp)       means over the response tokens of the rollout batch

- `algo.covariance.kind=kl`: the `share` of tokens with the largest cov has the loss
  -A u + coef |logp - old|, the others -A u. No ratio is clipped.
- `algo.covariance.kind=clip`: a random `share` of all tokens, with cov between `low` and `high`, has no loss;
  the others have PPO's clipped loss. Of the selected tokens, those that PPO clips keep their loss.

logp is the log-prob of the trainer before the update, so that the selection is the same for all micro-batches
and ranks. At least one token is selected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.algorithms import Covariance
from rlhf.core.metrics import selected
from rlhf.core.numerics import derive
from rlhf.objectives.objective import old_or_behaviour

if TYPE_CHECKING:
    from rlhf.config.algorithms import CovarianceConfig
    from rlhf.core.batch import Batch


def with_limited(batch: Batch, config: CovarianceConfig) -> Batch:
    """Return the rollout batch with `per_token["limited"]` [N, K, T] bool: the selected tokens."""
    assert batch.advantages is not None
    mask = batch.response_mask
    covariance = centred(batch.advantages, mask) * centred(old_or_behaviour(batch), mask)
    count = max(1, int(config.share * int(mask.sum())))
    if config.kind is Covariance.kl:
        order = covariance.masked_fill(~mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    else:
        band = mask & (covariance > config.low) & (covariance < config.high)
        places = band.flatten().nonzero()[:, 0]
        # The rows of the data set depend on the run's seed, and so does the draw.
        seed = derive(int(batch.index.sum()), "clip_cov", batch.trainer_version)
        rng = torch.Generator().manual_seed(seed)
        order = places[torch.randperm(len(places), generator=rng).to(places.device)]
    selected = torch.zeros_like(mask).flatten()
    selected[order[:count]] = True
    return replace(batch, per_token={**(batch.per_token or {}), "limited": selected.view_as(mask)})


def centred(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` minus its mean over the elements where `mask` is True."""
    return x - selected(x, mask).sum() / mask.sum().clamp(min=1)


def limited(
    free: Tensor, losses: Tensor, clipped: Tensor, log_ratio: Tensor, batch: Batch, config: CovarianceConfig
) -> Tensor:
    """Return the losses of the tokens [N, K, T] after the limits.

    Args:
        free: -A u of each token.
        losses: PPO's clipped loss of each token.
        clipped: the tokens that PPO clips, bool.
        log_ratio: log u of each token.
        batch: the micro-batch.
        config: kind and weight of the limits.
    """
    assert batch.per_token is not None
    selected = batch.per_token["limited"]
    if config.kind is Covariance.kl:
        return torch.where(selected, free + config.coef * log_ratio.abs(), free)
    return losses.masked_fill(selected & ~clipped, 0.0)
