"""Supervised fine-tuning: cross-entropy of the reference response.

    loss = - sum_t logp(response_t)        over response tokens, EOS included; divided by the number of tokens

Needs: prompts with reference responses (`generator=dataset`). The prompt is not trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.objectives.objective import Supervised

if TYPE_CHECKING:
    from rlhf.config.algo import SFTConfig
    from rlhf.core.batch import Batch
    from rlhf.core.metrics import Metrics
    from rlhf.objectives.objective import Counts, Forward, Losses


class SFT(Supervised):
    """Maximum likelihood of stored completions."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def credit(self, batch: Batch) -> Batch:
        """Every token counts alike."""
        return batch

    def count(self, batch: Batch) -> Counts:
        """Response tokens."""
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Minus the sum of the log-probs of the response tokens."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        return {"policy": -logprobs.sum()}, {}
