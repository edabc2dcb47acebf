"""Off-policy correction: an importance weight on each term of a policy-gradient loss.

    w = exp(old - behaviour)        log-probs of the trainer just before this update, and of the sampler

w is computed per token, or per sequence from log-probs summed over the response (`algo.correction.level`).
w differs from 1 because of lag, or because sampler and trainer compute with different numerics.

| `algo.correction.kind` | weight                       | source                                            |
|------------------------|------------------------------|---------------------------------------------------|
| `none`                 | 1                            | Noukhovitch et al., arXiv 2410.18252              |
| `truncate`             | min(w, cap)                  | Espeholt et al., arXiv 1802.01561                 |
| `mask`                 | w within [low, high], else 0 | Ling Team, arXiv 2510.18855                       |
| `decoupled`            | w                            | Hilton et al., 2110.00641; Fu et al., 2505.24298  |

The clipped ratio of the loss is always relative to `old`. `decoupled` with token weights is therefore
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
    """Return the importance weights of a micro-batch, and `correction/` metrics.

    Args:
        old: log-probs [N, K, T] of the trainer before this update, without gradient.
        behaviour: log-probs [N, K, T] of the sampler.
        mask: response mask [N, K, T] bool.
        config: kind, level and bounds of the correction.

    Returns:
        Weights [N, K, T] of tokens, or [N, K, 1] of sequences and for kind `none`. The metrics are the
        fraction of truncated weights (`truncate`), the fraction of masked weights (`mask`), the mean weight
        (`decoupled`), or empty (`none`).
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
