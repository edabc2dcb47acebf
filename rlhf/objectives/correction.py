"""Correction for samples of another policy: an importance weight on each term of a policy-gradient loss.

    w = exp(old - behaviour)        old: the trainer just before this update; behaviour: the sampler

per token, or per sequence with both summed over it. Lag makes w differ from 1, and so does a sampler that
computes otherwise than the trainer.

| `algo.correction.kind` | weight                       | source                                            |
|------------------------|------------------------------|---------------------------------------------------|
| `none`                 | 1                            | the original                                      |
| `truncate`             | min(w, cap)                  | Espeholt et al., arXiv 1802.01561                 |
| `mask`                 | w within [low, high], else 0 | Ling Team, arXiv 2510.18855                       |
| `decoupled`            | w                            | Hilton et al., 2110.00641; Fu et al., 2505.24298  |

The clipped ratio of the loss is taken to `old` in every case: with `decoupled` and token weights that makes
decoupled PPO. Weights carry no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.algo import CorrectionKind, Level
from rlhf.core.metrics import mean
from rlhf.objectives.objective import MAX_LOG_WEIGHT

if TYPE_CHECKING:
    from rlhf.config.algo import CorrectionConfig
    from rlhf.core.metrics import Metrics


def importance_weights(
    old: Tensor, behaviour: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Metrics]:
    """Weights [N, K, T], or [N, K, 1] of sequences, from log-probs [N, K, T] that carry no gradient; and how
    many were changed.
    """
    if config.kind is CorrectionKind.none:
        return torch.ones_like(old[..., :1]), {}
    log_weight = (old - behaviour) * mask
    if config.level is Level.sequence:
        log_weight = log_weight.sum(-1, keepdim=True)
        mask = torch.ones_like(log_weight, dtype=torch.bool)
    raw = log_weight.clamp(max=MAX_LOG_WEIGHT).exp()
    if config.kind is CorrectionKind.truncate:
        return raw.clamp(max=config.cap), {"correction/truncated": mean(raw > config.cap, mask)}
    if config.kind is CorrectionKind.mask:
        kept = (raw >= config.low) & (raw <= config.high)
        return raw * kept, {"correction/masked": mean(~kept, mask)}
    return raw, {"correction/weight": mean(raw, mask)}
