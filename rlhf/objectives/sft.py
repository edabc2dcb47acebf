"""SFT: supervised fine-tuning, the cross-entropy of the reference response.

Ouyang et al., arXiv 2203.02155.

    loss = - sum_t logp(response_t)        over response tokens, EOS included; divided by the number of tokens

Prompt tokens are not trained on. Needs: prompts with reference responses (`generator=dataset`). Prompts
without signal (see `rlhf.objectives.objective`): none.
"""

from __future__ import annotations

from rlhf.config.algorithms import SFTConfig
from rlhf.core.batch import Batch
from rlhf.core.metrics import Metrics, selected
from rlhf.objectives.objective import Counts, Forward, Losses, Supervised


class SFT(Supervised):
    """The SFT objective: maximum likelihood of stored completions."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens."""
        return {"policy": float(batch.response_mask.sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return minus the sum of the log-probs of the response tokens; no metrics."""
        logprobs = forward(batch).logprobs
        assert logprobs is not None
        return {"policy": -selected(logprobs, batch.response_mask).sum()}, {}
