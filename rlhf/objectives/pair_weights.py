"""Weights of preference pairs, for pairs that an older policy or another policy sampled.

The loss of a pair is multiplied by a weight without gradient, computed from the current policy:

| `algo.weighting` | weight of a pair        | source                             |
|------------------|-------------------------|------------------------------------|
| `none`           | 1                       |                                    |
| `is`             | exp(min(l_c + l_r, 2e)) | IS-DAA, arXiv 2506.08681           |
| `wpo`            | min(v_c v_r, clamp)     | WPO, Zhou et al., arXiv 2406.11827 |

    l = sum_t (logp_t - behaviour_t)                     log-ratio of policy to sampler of a response
    v = exp(mean_t (logp_t - log sum_v p_t(v)^2))        p_t: distribution of the policy over the vocabulary

c and r are the chosen and the rejected response, e is `algo.weighting_eps`, and clamp is
`algo.weighting_clamp`. With `is`, an on-policy pair has the weight 1. With `wpo`, v is about 1 for responses
of the policy itself. In both cases, pairs that became improbable have small weights. The sum of the weighted
losses is divided by the number of pairs, not by the sum of the weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlhf.config.algorithms import PairWeighting
from rlhf.core.metrics import mean, sample_size, selected
from rlhf.objectives.objective import MAX_LOG_WEIGHT, sampler_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.config.algorithms import DPOConfig
    from rlhf.core.batch import Batch, Outputs
    from rlhf.core.metrics import Metrics


def pair_weights(outputs: Outputs, batch: Batch, config: DPOConfig) -> tuple[Tensor, Metrics]:
    """Return the weights [N] of the pairs of a micro-batch, without gradient, and `weighting/` metrics.

    Args:
        outputs: the policy's log-probs [N, 2, T]; for `wpo` also `log_sum_squares` [N, 2, T].
        batch: the pairs; for `is` with `behaviour_logprobs`.
        config: kind and bound of the weights.
    """
    assert outputs.logprobs is not None
    logprobs, mask = outputs.logprobs.detach(), batch.response_mask
    if config.weighting is PairWeighting.none:
        return logprobs.new_ones(len(batch)), {}
    if config.weighting is PairWeighting.wpo:
        assert outputs.log_sum_squares is not None
        tokens = mask.sum(-1).clamp(min=1)
        log_weights = (selected(logprobs - outputs.log_sum_squares, mask).sum(-1) / tokens).sum(-1)
        bound = math.inf if config.weighting_clamp is None else math.log(config.weighting_clamp)
    else:
        log_weights = selected(logprobs - sampler_logprobs(logprobs, batch), mask).sum((1, 2))
        bound = 2 * config.weighting_eps
    bound = min(bound, MAX_LOG_WEIGHT)
    weights = log_weights.clamp(max=bound).exp()
    return weights, {
        "weighting/mean": mean(weights),
        "weighting/truncated": mean(log_weights > bound),
        "weighting/ess": sample_size(weights),
    }
