"""The estimate of the KL between policy and reference.

With `algo.kl_in=reward` the sum over a response is subtracted from its reward (`PolicyGradient.credit`; in
PPO, the estimate of each token from the reward of this token). With `algo.kl_in=loss` it is a term of the
loss (`PolicyGradient.policy_loss`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.config.algorithms import KLEstimator
from rlhf.objectives.objective import bounded


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimated KL from policy to reference at each token, for tokens sampled by the policy.

    k1 = logp - ref, k3 = exp(-k1) - 1 + k1 (Schulman 2020, "Approximating KL divergence"). The exponent is
    bounded like a log-ratio.
    """
    k1 = logprobs - ref_logprobs
    return k1 if estimator is KLEstimator.k1 else torch.expm1(bounded(-k1)) + k1
