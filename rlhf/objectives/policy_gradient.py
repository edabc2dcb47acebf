"""The base class of the policy-gradient objectives: rewards, ratio, clipping, KL penalty and correction.

PPO's clipped surrogate: Schulman et al., arXiv 1707.06347.

    reward      r = score - beta sum_t k_t          the KL term only with `algo.kl_in=reward`
    ratio       u = exp(min(logp - anchor, 20))     anchor: log-probs of the trainer just before this update
    surrogate   max(-A u, -A clip(u, 1 - low, 1 + high))
    loss        sum of w * surrogate + beta u k     the KL term only with `algo.kl_in=loss`

k is the KL estimate of a token (`algo.kl_estimator`), beta is `algo.kl_coef`. w is the importance weight of
the off-policy correction (`rlhf.objectives.correction`), which may also reject tokens. With the factor u, the
gradient of the KL term is an unbiased estimate of the gradient of the KL (DeepSeek-V3.2, arXiv 2512.02556,
section 3.1): of each token given the tokens before it or, with a ratio of responses, of the response.
`algo.kl_unbiased=false` omits this factor.

Options of every policy-gradient algorithm, off by default:

- `algo.anchor`: the policy in the denominator of u (`_anchor_logprobs`).
- `algo.off_policy_mask`: no policy term for responses with A < 0 and mean_t (behaviour - logp) above this
  (DeepSeek-V3.2, section 3.1). The tokens still count.
- `algo.dual_clip` c: where A < 0, the surrogate is at most -A c (Ye et al., arXiv 1912.09729).
- `algo.covariance`: KL-Cov and Clip-Cov (`_with_limited`, `limited`).
- `algo.square_coef` c: c (log u)^2 is added to the loss of each token (prime-rl).
- `algo.entropy_coef`: minus this times the entropy of the policy at each token is added to the loss.

An algorithm overrides some of the methods `advantages`, `log_ratio`, `surrogate`, `reduce` and `count`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.algorithms import Anchor, Covariance, KLEstimator, KLIn, Level
from rlhf.core.batch import Batch, Outputs
from rlhf.core.launched import derive
from rlhf.core.metrics import Metrics, Stat, mean, selected
from rlhf.objectives import objective
from rlhf.objectives.correction import corrected, importance_weights, over_tokens
from rlhf.objectives.objective import Counts, Forward, Losses, Objective

if TYPE_CHECKING:
    from rlhf.config.algorithms import CovarianceConfig, PolicyGradientConfig


class PolicyGradient(Objective):
    """A policy-gradient objective: raises the log-prob of each token in proportion to its advantage."""

    # Advantages sum to about 0, and the ratio is 1 at the first step: only the gradient counts.
    shows_loss = False

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config
        self.kl_coef = config.kl_coef
        self.needs = frozenset({"ref_logprobs"})
        if config.anchor is Anchor.old and config.reads_anchor:
            self.needs |= {"ratio"}
        if config.anchor is Anchor.old and self.credits_kl:
            self.needs |= {"old_logprobs"}
        if config.correction.coupled or config.covariance.kind is not Covariance.none:
            self.needs |= {"correction"}
        if config.entropy_coef:
            self.needs |= {"entropy"}

    @property
    def kl_in_reward(self) -> bool:
        """Return True if the KL penalty is subtracted from the rewards."""
        return self.config.kl_in is KLIn.reward and self.config.kl_coef > 0

    @property
    def credits_kl(self) -> bool:
        """Return True if `credit` estimates the KL."""
        return self.kl_in_reward

    @property
    def kl_in_loss(self) -> bool:
        """Return True if the KL penalty is added to the loss."""
        return self.config.kl_in is KLIn.loss and self.config.kl_coef > 0

    @property
    def skips_ties(self) -> bool:
        """Return True if prompts whose advantages are all 0 skip the forward pass.

        Such a prompt has a gradient only if the loss has a KL penalty, an entropy bonus or a squared ratio.
        """
        config, penalty = self.config, self.config.covariance.kind is Covariance.kl
        return not (self.kl_in_loss or config.entropy_coef or config.square_coef or penalty)

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with advantages [N, K, T], equal for all tokens of a response, and signal [N]."""
        rewards = self.scores(batch)
        if self.kl_in_reward:
            rewards = rewards - self.kl_coef * self.kl(batch).sum(-1)
        advantages = self.response_advantages(rewards, batch)
        signal = (advantages != 0).any(1) if self.skips_ties else None
        advantages = selected(advantages[:, :, None], batch.response_mask)
        return self.coupled(replace(batch, advantages=advantages, signal=signal))

    def coupled(self, batch: Batch) -> Batch:
        """Return the batch with advantages, and with what couples its tokens: correction and covariance."""
        if self.config.correction.coupled:
            batch = corrected(batch, self.config.correction)
        if self.config.covariance.kind is not Covariance.none:
            batch = _with_limited(batch, self.config.covariance)
        return batch

    def scores(self, batch: Batch) -> Tensor:
        """Return the scores [N, K], if configured normalised over the batch, then clipped."""
        scores = batch.scores
        if self.config.normalize_scores:
            scores = (scores - scores.mean()) / (scores.std() + 1e-8)
        if self.config.clip_scores is not None:
            scores = scores.clamp(-self.config.clip_scores, self.config.clip_scores)
        return scores

    def kl(self, batch: Batch) -> Tensor:
        """Return the KL estimates [N, K, T]; 0 at padding.

        They are those of the policy before this update if `old_logprobs` exist, else of the policy that
        sampled.
        """
        assert batch.ref_logprobs is not None
        kl = kl_estimate(objective.old_or_behaviour(batch), batch.ref_logprobs, self.config.kl_estimator)
        return selected(kl, batch.response_mask)

    def token_rewards(self, kl: Tensor, scores: Tensor, states: Tensor) -> Tensor:
        """Return the rewards of single states: the KL penalty if it is in the reward, at the last the score.

        Args:
            kl: KL estimates [N, K, T].
            scores: scores [N, K].
            states: the states that count, [N, K, T] or [N, K, T+1] bool.
        """
        rewards = torch.zeros(states.shape, dtype=scores.dtype, device=states.device)
        if self.kl_in_reward:
            rewards[..., : kl.shape[-1]] = -self.kl_coef * kl
        places = torch.arange(states.shape[-1], device=states.device)
        return rewards.scatter_add_(-1, (places * states).amax(-1, keepdim=True), scores[..., None])

    def response_advantages(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Return `advantages`; an algorithm overrides this if they depend on more than the rewards."""
        return self.advantages(rewards)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages [N, K] of responses, given their rewards [N, K]; `credit` calls it."""
        raise NotImplementedError

    def log_ratio(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Return the logarithm of the ratio u, [N, K, T] or of responses [N, K, 1], given `logp - old`."""
        if self.config.level is Level.token:
            return difference
        return over_tokens(selected(difference, mask), mask, self.config.level is Level.geometric)

    def surrogate(self, log_ratio: Tensor, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [N, K, T] without w and KL, and which ratios are clipped (bool).

        Without a ratio, the loss is that of REINFORCE, and nothing is clipped.

        Args:
            log_ratio: logarithm of the ratio [N, K, T], or [N, K, 1] for a ratio of sequences.
            logprobs: log-probs [N, K, T] of the policy being trained.
            batch: the micro-batch with advantages [N, K, T].
        """
        assert batch.advantages is not None
        config, advantages = self.config, batch.advantages
        if not config.has_ratio:
            return -advantages * logprobs, torch.zeros_like(log_ratio, dtype=torch.bool)
        ratio = log_ratio.exp()
        free = -advantages * ratio
        bound = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        clipped = bound > free
        losses = torch.where(clipped, bound, free)  # at a bound, `clamp` of torch 2.14 has no gradient
        if config.covariance.kind is not Covariance.none:
            losses = limited(free, losses, clipped, log_ratio, batch, config.covariance)
        if config.dual_clip is not None:
            most = -advantages * config.dual_clip
            clipped = clipped | ((advantages < 0) & (losses > most))
            losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
        return losses, clipped[..., : log_ratio.shape[-1]]

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the losses [N, K, T], which the engine divides by `count`; all tokens weigh 1."""
        return selected(losses, mask).sum()

    def count(self, batch: Batch) -> Counts:
        """Return the number of response tokens that are trained on."""
        return {"policy": float(trained(batch).sum())}

    def loss(self, forward: Forward, batch: Batch) -> tuple[Losses, Metrics]:
        """Return the sum of the policy loss over a micro-batch, and metrics."""
        out = forward(batch)
        assert out.logprobs is not None
        loss, metrics = self.policy_loss(out, batch)
        return {"policy": loss}, metrics

    def policy_loss(self, out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the sum of the policy loss, given the outputs of the policy's forward pass, and metrics."""
        assert out.logprobs is not None
        mask, config, real = trained(batch), self.config, batch.response_mask
        logprobs = selected(out.logprobs, real)
        anchor = _anchor_logprobs(logprobs, batch, config.anchor)
        difference = selected(logprobs - anchor, real)
        log_ratio = objective.bounded(self.log_ratio(difference, real))
        losses, clipped = self.surrogate(log_ratio, logprobs, batch)
        weights, metrics = self.weights(anchor, objective.sampler_logprobs(logprobs, batch), batch)
        losses = losses * weights
        if config.off_policy_mask is not None:
            away = _off_policy(logprobs, batch, config.off_policy_mask)
            losses = losses.masked_fill(away, 0.0)
            metrics["policy/off_policy_masked"] = mean(away, mask)
        if config.square_coef:
            losses = losses + config.square_coef * log_ratio.square()
        if self.kl_in_loss:
            assert batch.ref_logprobs is not None
            kl = kl_estimate(logprobs, selected(batch.ref_logprobs, real), config.kl_estimator)
            if config.kl_unbiased:
                # With a mean over the tokens of a response, the gradient would be divided by their number.
                factor = difference if config.level is Level.geometric else self.log_ratio(difference, real)
                kl = kl * objective.bounded(factor).exp()
            losses = losses + self.kl_coef * kl
        if config.entropy_coef:
            assert out.entropy is not None
            losses = losses - config.entropy_coef * out.entropy
            metrics["policy/entropy"] = mean(out.entropy, mask)
        if batch.per_token is not None and "limited" in batch.per_token:
            metrics["policy/covariance_limited"] = mean(batch.per_token["limited"], mask)
        before = objective.old_or_behaviour(batch) if config.anchor is Anchor.old else anchor
        ratio = objective.bounded(self.log_ratio(selected(logprobs.detach() - before, real), real)).exp()
        return self.reduce(losses, mask), {
            **objective.mismatch(logprobs, batch),
            **metrics,
            "policy/ratio": _mean_of(ratio, mask),
            "policy/clipfrac": _mean_of(clipped.float(), mask),
        }

    def observe(self, batch: Batch) -> Metrics:
        """Return metrics that cover all prompts of a minibatch; `correction/` where the weights are known."""
        found = super().observe(batch)
        known = batch.old_logprobs is not None and self.config.anchor is Anchor.old
        if known or "weights" in (batch.per_token or {}):
            old = objective.old_or_behaviour(batch)
            found |= self.weights(old, objective.sampler_logprobs(old, batch), batch)[1]
        return found

    def weights(self, anchor: Tensor, behaviour: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return importance weights, [N, K, T] or [N, K, 1], and `correction/` metrics.

        Args:
            anchor: log-probs [N, K, T] of the policy in the denominator of the ratio.
            behaviour: log-probs [N, K, T] of the sampler.
            batch: the micro-batch.
        """
        mask = batch.response_mask
        if batch.per_token is None or "weights" not in batch.per_token:
            return importance_weights(anchor, behaviour, mask, self.config.correction)
        weights = batch.per_token["weights"]
        return weights, {
            "correction/weight": mean(weights, trained(batch)),
            "correction/rejected": mean(~batch.per_token["kept"], mask),
        }


def trained(batch: Batch) -> Tensor:
    """Return which tokens are in the sum and in the count of the loss, [N, K, T] bool."""
    return (batch.per_token or {}).get("trained", batch.response_mask)


def _off_policy(logprobs: Tensor, batch: Batch, limit: float) -> Tensor:
    """Return the tokens [N, K, T] with A < 0 of responses that the policy has become unlikely to sample.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch with advantages.
        limit: bound on the mean of sampler - policy log-probs of a response.
    """
    assert batch.advantages is not None
    gap = selected(objective.sampler_logprobs(logprobs, batch) - logprobs.detach(), batch.response_mask)
    return (batch.advantages < 0) & (over_tokens(gap, batch.response_mask, averaged=True) > limit)


def _mean_of(x: Tensor, mask: Tensor) -> Stat:
    """Return the mean of `x`: over response tokens if `x` is [N, K, T], over sequences if [N, K, 1]."""
    return mean(x, mask if x.shape == mask.shape else None)


# The estimate of the KL between policy and reference.
#
# With `algo.kl_in=reward` the sum over a response is subtracted from its reward (`PolicyGradient.credit`; in
# PPO, the estimate of each token from the reward of this token). With `algo.kl_in=loss` it is a term of the
# loss (`PolicyGradient.policy_loss`).


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimated KL from policy to reference at each token, for tokens sampled by the policy.

    k1 = logp - ref, k3 = exp(-k1) - 1 + k1 (Schulman 2020, "Approximating KL divergence"). The exponent is
    bounded like a log-ratio.
    """
    k1 = logprobs - ref_logprobs
    return k1 if estimator is KLEstimator.k1 else torch.expm1(objective.bounded(-k1)) + k1


# The policy in the denominator of the ratio of a policy-gradient loss (`algo.anchor`).
#
# | `algo.anchor` | log-probs                                          | source                              |
# |---------------|----------------------------------------------------|-------------------------------------|
# | `old`         | of the trainer just before the update              | Schulman et al., arXiv 1707.06347   |
# | `behaviour`   | of the sampler                                     | Yao et al. 2025; "bypass" in verl   |
# | `loglinear`   | behaviour + (1 - 1/d) (sg(logp) - behaviour)       | A-3PO, arXiv 2512.06547             |
# | `linear`      | the same between probabilities                     | AReaL                               |
#
# d is the lag of a token plus 1: the version that this update makes, minus the version that sampled the
# token. With d = 1 (on-policy), `loglinear` is the sampler. It is computed again in every minibatch from the
# current log-probs, so that no forward pass for `old` is needed.


def _anchor_logprobs(logprobs: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
    """Return the anchor's log-probs [N, K, T] without gradient.

    Args:
        logprobs: log-probs [N, K, T] of the policy being trained.
        batch: the micro-batch; without `old_logprobs`, the policy has not changed since the update began.
        anchor: the policy in the denominator of the ratio.
    """
    if anchor is Anchor.old:
        return objective.before_update(logprobs, batch)
    current = logprobs.detach()
    behaviour = objective.sampler_logprobs(logprobs, batch)
    if anchor is Anchor.behaviour:
        return behaviour
    versions = behaviour.new_tensor(batch.version) if batch.token_versions is None else batch.token_versions
    share = 1 - 1 / (batch.trainer_version + 1 - versions).clamp(min=1)
    if anchor is Anchor.linear:
        return ((1 - share) * behaviour.exp() + share * current.exp() + 1e-10).log()
    return behaviour + share * (current - behaviour)


# KL-Cov and Clip-Cov: limits on the few tokens that lower the entropy of the policy most.
#
# Cui et al., arXiv 2505.22617.
#
#     cov_t = (A_t - mean A) (logp_t - mean logp)       means over the response tokens of the rollout batch
#
# - `algo.covariance.kind=kl`: the `share` of tokens with the largest cov has the loss
#   -A u + coef |logp - old|, the others -A u. No ratio is clipped.
# - `algo.covariance.kind=clip`: a random `share` of all tokens, with cov between `low` and `high`, has no
#   loss; the others have PPO's clipped loss. Of the selected tokens, those that PPO clips keep their loss.
#
# logp is the log-prob of the trainer before the update, so that the selection is the same for all
# micro-batches and ranks. At least one token is selected.


def _with_limited(batch: Batch, config: CovarianceConfig) -> Batch:
    """Return the rollout batch with `per_token["limited"]` [N, K, T] bool: the selected tokens."""
    assert batch.advantages is not None
    mask = batch.response_mask
    covariance = _centred(batch.advantages, mask) * _centred(objective.old_or_behaviour(batch), mask)
    count = max(1, int(config.share * int(mask.sum())))
    if config.kind is Covariance.kl:
        order = covariance.masked_fill(~mask, -torch.inf).flatten().argsort(descending=True, stable=True)
    else:
        band = mask & (covariance > config.low) & (covariance < config.high)
        places = band.flatten().nonzero()[:, 0]
        # The rows of the data set depend on the run's seed, and so does the draw.
        seed = derive(int(batch.index.sum()), "clip_cov", batch.trainer_version)
        rng = torch.Generator().manual_seed(seed)
        order = places[torch.randperm(len(places), generator=rng).to(places.device)]
    selected = torch.zeros_like(mask).flatten()
    selected[order[:count]] = True
    return replace(batch, per_token={**(batch.per_token or {}), "limited": selected.view_as(mask)})


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` minus its mean over the elements where `mask` is True."""
    return x - selected(x, mask).sum() / mask.sum().clamp(min=1)


def limited(
    free: Tensor, losses: Tensor, clipped: Tensor, log_ratio: Tensor, batch: Batch, config: CovarianceConfig
) -> Tensor:
    """Return the losses of the tokens [N, K, T] after the limits.

    Args:
        free: -A u of each token.
        losses: PPO's clipped loss of each token.
        clipped: the tokens that PPO clips, bool.
        log_ratio: log u of each token.
        batch: the micro-batch.
        config: kind and weight of the limits.
    """
    assert batch.per_token is not None
    selected = batch.per_token["limited"]
    if config.kind is Covariance.kl:
        return torch.where(selected, free + config.coef * log_ratio.abs(), free)
    return losses.masked_fill(selected & ~clipped, 0.0)
