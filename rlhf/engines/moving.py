"""A reference that follows the policy, and a policy that is reset to its moving average (`model.moving`).

After each update, with the weights p of the policy, r of the reference, and a of the average (p at first):

| `model.moving`   | each update           | after every `every` updates | source                          |
|------------------|-----------------------|-----------------------------|---------------------------------|
| `share=s`        |                       | r <- s p + (1 - s) r        | TR-DPO, arXiv 2404.09656        |
| `share=1`        |                       | r <- p                      | ProRL, arXiv 2505.24864         |
| `decay=d`        | a <- d a + (1 - d) p  | p <- a, then a <- r         | Elastic Reset, arXiv 2312.07551 |

With `every=1`, the reference is a moving average of the policy. A reset changes neither the value model nor
the state of the optimizer, as in the code of the authors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf.config.models import MovingConfig
from rlhf.models.modules import Policy


class Moving:
    """The rule of `model.moving`, which changes weights of a policy or of its reference in place.

    Attributes:
        moved: the weights that follow those of the policy, which a checkpoint must contain.

    Args:
        config: the config section; its `every` is set.
        policy: the policy, with all weights on this rank.
        reference: the reference, which has the initial weights of the policy, in float32.
    """

    def __init__(self, config: MovingConfig, policy: Policy, reference: Policy) -> None:
        self.config, self.policy, self.reference = config, policy.model, reference.model
        self.moved: list[Tensor] = list(self.reference.parameters())
        if config.decay is not None:
            self.moved = [each.detach().clone() for each in self.policy.parameters()]

    def __call__(self, version: int) -> None:
        """Apply the rule after the update that made the weights `version`."""
        decay, due = self.config.decay, version % (self.config.every or 1) == 0
        if due or decay is not None:
            mix(self.moved, self.policy.parameters(), self.config.share if decay is None else 1 - decay)
        if due and decay is not None:
            mix(self.policy.parameters(), self.moved, 1.0)
            mix(self.moved, self.reference.parameters(), 1.0)


@torch.no_grad()
def mix(weights: Iterable[Tensor], others: Iterable[Tensor], share: float) -> None:
    """Set weights to `share` of the others and 1 - `share` of themselves, in place."""
    for own, other in zip(weights, others, strict=True):
        own.lerp_(other, share)
