"""ScaleRL: truncated ratios to the sampler as weights, and a mean over prompts.

Khatri et al., arXiv 2510.13786.

    A_i = (r_i - mean of the prompt) / std of all centred rewards of the batch
    loss = mean over prompts of  sum of -stopgrad(min(rho, cap)) A logp / response tokens of the prompt
    rho = exp(logp - behaviour)

Prompts whose K rewards are equal leave the batch's std, the sum and the count (`algo.ties=drop`). Two more
parts of the paper are settings of their own: `model.float32_head=true` computes logits in float32, and
`schedule.solved_at=0.9` leaves out prompts that were solved in 90 % of their samples ("no-positive-
resampling").

Needs: K >= 2, reference log-probs.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.algorithms import Scale, ScaleRLConfig
from rlhf.core.batch import Batch
from rlhf.core.launched import root
from rlhf.objectives.advantages import centred
from rlhf.objectives.grpo import GRPO


class ScaleRL(GRPO):
    """The ScaleRL objective: CISPO's loss with batch-normalised advantages and a mean over prompts."""

    config: ScaleRLConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return centred rewards [N, K] divided by their biased std over the prompts with variance."""
        if self.config.scale is not Scale.batch:
            return super().advantages(rewards)
        advantages = centred(rewards)
        spread = root(advantages[(advantages != 0).any(1)].square().mean())
        return advantages / spread if spread > 0 else advantages

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T], and which weights are truncated (bool)."""
        assert batch.advantages is not None
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(max=self.config.cap)
        return -weight * batch.advantages * logprobs, weight != ratio
