"""The policy in the denominator of the ratio of a policy-gradient loss (`algo.anchor`).

| `algo.anchor` | log-probs                                          | source                              |
|---------------|----------------------------------------------------|-------------------------------------|
| `old`         | of the trainer just before the update              | Schulman et al., arXiv 1707.06347   |
| `behaviour`   | of the sampler                                     | Yao et al. 2025; "bypass" in verl   |
| `loglinear`   | behaviour + (1 - 1/d) (sg(logp) - behaviour)       | A-3PO, arXiv 2512.06547             |

d is the lag of a token plus 1: the version that this update makes, minus the version that sampled the token.
With d = 1 (on-policy), `loglinear` is the sampler. It is computed again in every minibatch from the current
log-probs, so that no forward pass for `old` is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.algorithms import Anchor
from rlhf.objectives.objective import before_update, sampler_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.core.batch import Batch


def anchor_logprobs(logprobs: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
    """Return the anchor's log-probs [N, K, T] without gradient.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch; without `old_logprobs`, the policy has not changed since the update began.
        anchor: the policy in the denominator of the ratio.
    """
    if anchor is Anchor.old:
        return before_update(logprobs, batch)
    current = logprobs.detach()
    behaviour = sampler_logprobs(logprobs, batch)
    if anchor is Anchor.behaviour:
        return behaviour
    made = batch.trainer_version + 1
    if batch.token_versions is None:
        return behaviour + (1 - 1 / max(1, made - batch.version)) * (current - behaviour)
    lag = (made - batch.token_versions).clamp(min=1)
    return behaviour + (1 - 1 / lag) * (current - behaviour)
