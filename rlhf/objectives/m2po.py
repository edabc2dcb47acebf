"""M2PO: a policy gradient whose ratios to the sampler have a bounded second moment.

Zheng et al., arXiv 2510.01161.

    rho = exp(logp - behaviour)
    M2  = mean of (log rho)^2 over the tokens with A > 0 and rho > 1, or A < 0 and rho < 1
    mask: loss = mean over tokens of -M A rho; M = 0 for the tokens of largest (log rho)^2, until M2 of the
          others is at most `algo.limit`
    clip: loss = mean over tokens of max(-A rho, -A clip(rho, exp(-c), exp(c))); c^2 is the largest
          (log rho)^2 for which the mean of min((log rho)^2, c^2) is at most `algo.limit`

`algo.form` selects `mask` (default, the paper) or `clip` (the code of the authors, which never clips ratios
from 1 - `algo.least_low` to 1 + `algo.least_high`). The mask and the bound depend on all tokens of a rollout
batch. They are computed once per batch from the trainer before the update. Masked tokens count in the mean.

Needs: K >= 2, reference log-probs, the log-probs of the trainer before the update. Prompts without signal: as
in GRPO, see `rlhf.objectives.grpo`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rlhf.config.algorithms import M2POConfig, M2POForm
from rlhf.core.batch import Batch
from rlhf.core.launched import root
from rlhf.core.metrics import selected
from rlhf.objectives.correction import clip_bound, largest_kept
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import old_or_behaviour, sampler_logprobs


class M2PO(GRPO):
    """The M2PO objective: a bound on the second moment of the log-ratios."""

    config: M2POConfig

    def __init__(self, config: M2POConfig) -> None:
        super().__init__(config)
        self.needs |= {"correction"}

    def coupled(self, batch: Batch) -> Batch:
        """Return the batch with `per_token["reach"]` [N, K, T]: the largest |log rho| that is not limited."""
        batch = super().coupled(batch)
        assert batch.advantages is not None
        old = old_or_behaviour(batch)
        lag = selected(old - sampler_logprobs(old, batch), batch.response_mask)
        region = (batch.advantages * lag > 0) & batch.response_mask
        squares = lag.square()
        if self.config.form is M2POForm.clip:
            reach = root(clip_bound(squares[region], self.config.limit)).expand_as(lag)
        else:
            kept = ~region | (squares < largest_kept(squares, region, self.config.limit))
            reach = torch.where(kept, torch.inf, 0.0)
        return replace(batch, per_token={**(batch.per_token or {}), "reach": reach})

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and which tokens are masked or clipped (bool)."""
        assert batch.advantages is not None and batch.per_token is not None
        reach = batch.per_token["reach"]
        free = -batch.advantages * log_ratio.exp()
        if self.config.form is M2POForm.mask:
            return free.masked_fill(reach == 0, 0.0), reach == 0
        low = (-reach).clamp(max=math.log1p(-self.config.least_low))
        high = reach.clamp(min=math.log1p(self.config.least_high))
        bound = -batch.advantages * log_ratio.clamp(low, high).exp()
        return torch.where(bound > free, bound, free), bound > free
