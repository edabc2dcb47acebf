"""Sections of the policy-gradient algorithms (`algo=...`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from rlhf.config.algo import AlgoConfig, Ties
from rlhf.config.correction import (
    Anchor,
    CorrectionConfig,
    CorrectionKind,
    Covariance,
    CovarianceConfig,
    Level,
    Reject,
)
from rlhf.config.schema import Choice, entry, number, option, plain


class KLIn(Choice):
    """The place of the KL penalty: subtracted from the rewards, or added to the loss."""

    reward = "reward"
    loss = "loss"


class KLEstimator(Choice):
    """The estimate of the KL of a token from one sample. k3 is never negative and varies less than k1."""

    k1 = "k1", "logp - ref"
    k3 = "k3", "exp(ref - logp) - 1 + logp - ref"


class Scale(Choice):
    """The rewards whose standard deviation divides advantages: the prompt's, the batch's, or no division."""

    group = "group"
    batch = "batch"
    none = "none"


class Advantage(Choice):
    """The baseline that is subtracted from the reward of a response."""

    mean = "mean", "mean reward of the prompt's K samples"
    leave_one_out = "leave_one_out", "mean reward of the prompt's other samples"
    opo = "opo", "mean reward of the prompt's K samples, weighted by their lengths (arXiv 2505.23585)"
    none = "none", "0: the advantage is the reward"


class RLOOLoss(Choice):
    """The policy term in the loss of a response."""

    clip = "clip", "the clipped ratio of the whole response"
    reinforce = "reinforce", "the log-prob of the response"


class ValueFrom(Choice):
    """The weights that the value model starts from."""

    reward = "reward", "the reward model"
    policy = "policy", "the policy, with a head whose initial values are 0"


CLIP_RANGE = ("clip_low", "clip_high")
CLIPPED_LOSS = ("dual_clip", "covariance.kind")  # options of PPO's clipped loss


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig(AlgoConfig):
    """The keys that policy-gradient algorithms share."""

    sequence_ratio: ClassVar[bool] = False  # one ratio per response, not per token

    clip_low: float = number(0.2, least=0, most=1, means="ratios are clipped at 1 - clip_low")
    clip_high: float = number(0.2, above=0, means="ratios are clipped at 1 + clip_high")
    kl_coef: float = number(
        0.0, least=0, means="beta, weight of the KL penalty; 0: no penalty", remedy="0.05"
    )
    kl_in: KLIn = KLIn.loss
    kl_estimator: KLEstimator = KLEstimator.k3
    kl_unbiased: bool = entry(
        True, means="kl_in=loss: multiply the KL estimate by the ratio, for the gradient of the KL"
    )
    normalize_scores: bool = entry(
        False, means="scale scores to mean 0 and standard deviation 1 over the rollout batch"
    )
    clip_scores: float | None = number(
        None,
        above=0,
        means="limit of the absolute value of scores, applied after normalising; null: no limit",
    )
    anchor: Anchor = entry(Anchor.old, added=True)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    off_policy_mask: float | None = number(
        None,
        least=0,
        means="responses with A < 0 get no policy loss if the mean of sampler - policy log-probs of their "
        "tokens exceeds this; null: off",
        remedy="0.5",
        added=True,
    )
    dual_clip: float | None = number(
        None,
        above=1,
        means="with A < 0 the loss of a token is at most -dual_clip A; null: no limit",
        remedy="3",
        added=True,
    )
    entropy_coef: float = number(0.0, least=0, means="weight of the entropy bonus of the policy", added=True)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if two settings contradict each other, or if the loss ignores a key that is set."""
        yield from AlgoConfig.problems(self, at)
        correction, anchor = self.correction, self.anchor
        if anchor is Anchor.behaviour and correction.kind is not CorrectionKind.none:
            yield (
                "algo.correction.kind must be none with algo.anchor=behaviour (the ratio of the loss is the "
                f"weight already), got {correction.kind.value}; set algo.correction.kind=none"
            )
        if anchor is Anchor.loglinear and correction.coupled:
            yield (
                "algo.correction.reject and algo.correction.normalise must not be set with "
                "algo.anchor=loglinear (they need the log-probs that this anchor saves); set algo.anchor=old"
            )
        limits = self.covariance.kind
        if self.sequence_ratio and limits is not Covariance.none and "covariance.kind" not in self.unused():
            yield (
                f"algo.covariance.kind must be none for algo={self.name} (it limits single tokens, but the "
                f"ratio is that of a whole response), got {limits.value}; set algo.covariance.kind=none"
            )
        default = type(self)()
        for key in self.unused():
            value, unset = (attrgetter(key)(section) for section in (self, default))
            if value != unset:
                unset = unset.value if isinstance(unset, Choice) else plain(unset)
                yield (
                    f"algo.{key} must not be set for algo={self.name} (its loss does not use it), got "
                    f"{value.value if isinstance(value, Choice) else plain(value)}; set algo.{key}={unset}"
                )

    def corrections(self) -> list[str]:
        """Return the setting that weights samples of older weights, if the loss does not correct for them."""
        if self.correction.kind is not CorrectionKind.none or self.anchor is not Anchor.old:
            return []
        level = " algo.correction.level=sequence" if self.sequence_ratio else ""
        return [f"algo.correction.kind=truncate{level}"]

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss needs the log-probs of the sampler: always, for ratios."""
        return True

    @property
    def reads_anchor(self) -> bool:
        """Whether the loss reads the log-probs of `anchor`."""
        return True

    def unused(self) -> tuple[str, ...]:
        """Return the keys of the clipped loss that the loss of this algorithm does not use."""
        return ()

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning if the KL penalty has no gradient, or if a sequence loss has weights of tokens."""
        in_loss = self.kl_coef > 0 and self.kl_in is KLIn.loss
        if in_loss and self.kl_estimator is KLEstimator.k1 and not self.kl_unbiased:
            yield (
                "algo.kl_estimator=k1 with algo.kl_unbiased=false has a gradient of 0 on average (the "
                "gradient of log-probs), so the KL penalty has no effect; set algo.kl_unbiased=true"
            )
        if not self.sequence_ratio:
            return
        correction = self.correction
        if correction.kind is not CorrectionKind.none and correction.level is Level.token:
            yield (
                f"algo.correction.level=token with algo={self.name} averages weights of tokens in a loss of "
                "whole responses; set algo.correction.level=sequence"
            )
        if correction.reject in (Reject.token, Reject.m2):
            yield (
                f"algo.correction.reject={correction.reject.value} with algo={self.name} rejects tokens in a "
                "loss of whole responses; set algo.correction.reject=mean"
            )


@option("algo", "ppo", part="rlhf.objectives.ppo:PPO")
@dataclass(kw_only=True, slots=True)
class PPOConfig(PolicyGradientConfig):
    """PPO: a value model and generalised advantage estimation."""

    learns_from_ties: ClassVar[bool] = True

    name: str = "ppo"
    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1
    kl_target: float | None = number(
        None,
        above=0,
        means="target KL of a response, to which kl_coef adapts; null: kl_coef is constant",
        remedy="6",
    )
    kl_horizon: float = number(
        10000, above=0, means="episodes over which kl_coef adapts; a larger value adapts more slowly"
    )
    gamma: float = number(1.0, least=0, most=1, means="discount of later rewards")
    lam: float = number(0.95, least=0, most=1, means="lambda of the advantage estimation")
    vf_coef: float = number(0.1, least=0, means="weight of the value loss")
    clip_value: float = number(
        0.2, above=0, means="largest difference of new and old values before the value loss is clipped"
    )
    whiten_advantages: bool = entry(True, means="scale advantages to mean 0 and standard deviation 1")
    whiten_rewards: bool = entry(False, means="scale rewards to standard deviation 1; keep their mean")
    end_state: bool = entry(
        True, means="the state after the last token is a separate step, which receives the score"
    )
    value_from: ValueFrom | None = entry(
        None, means="null: the reward model if the scorer uses one, else the policy"
    )
    value_lr: float | None = number(
        None, above=0, means="learning rate of the value model; null: optim.lr", remedy="null"
    )

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if `kl_target` is set and `kl_coef` is 0: a coefficient of 0 cannot adapt."""
        yield from PolicyGradientConfig.problems(self, at)
        if self.kl_target is not None and not self.kl_coef:
            yield (
                "algo.kl_coef must be > 0 with algo.kl_target (the coefficient adapts by factors), got 0; "
                "set algo.kl_coef=0.05"
            )


@option("algo", "rloo", part="rlhf.objectives.rloo:RLOO")
@dataclass(kw_only=True, slots=True)
class RLOOConfig(PolicyGradientConfig):
    """RLOO: REINFORCE with the mean reward of a prompt's other samples as baseline."""

    min_samples: ClassVar[int] = 2
    sequence_ratio: ClassVar[bool] = True

    name: str = "rloo"
    samples_per_prompt: int = 2
    loss_type: RLOOLoss = RLOOLoss.clip
    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1

    @property
    def reads_anchor(self) -> bool:
        """Whether the policy term, the importance weights or the KL term of the loss read the anchor."""
        weighted = self.correction.kind is not CorrectionKind.none
        ratio_of_kl = self.kl_coef > 0 and self.kl_in is KLIn.loss and self.kl_unbiased
        return self.loss_type is RLOOLoss.clip or weighted or ratio_of_kl

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error if `anchor` is set and the loss has no ratio."""
        yield from PolicyGradientConfig.problems(self, at)
        if self.anchor is not Anchor.old and not self.reads_anchor:
            yield (
                "algo.anchor must be old with algo.loss_type=reinforce (this loss has no ratio; "
                f"algo.correction corrects for older samples), got {self.anchor.value}; set algo.anchor=old"
            )

    def unused(self) -> tuple[str, ...]:
        """Return the keys of the clipped loss for `loss_type=reinforce`, which has no ratio."""
        reinforce = self.loss_type is RLOOLoss.reinforce
        return (*CLIP_RANGE, *CLIPPED_LOSS) if reinforce else ()


@option("algo", "grpo", part="rlhf.objectives.grpo:GRPO")
@dataclass(kw_only=True, slots=True)
class GRPOConfig(PolicyGradientConfig):
    """GRPO: PPO's clipped ratio with advantages relative to the K samples of a prompt."""

    min_samples: ClassVar[int] = 2

    name: str = "grpo"
    samples_per_prompt: int = 4
    kl_coef: float = 0.04
    advantage: Advantage = entry(Advantage.mean, added=True)
    scale: Scale = Scale.group
    ties: Ties = Ties.keep

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning if the advantages of OPO are divided by a standard deviation."""
        yield from PolicyGradientConfig.warnings(self, at)
        if self.advantage is Advantage.opo and self.scale is not Scale.none:
            yield (
                f"algo.advantage=opo with algo.scale={self.scale.value} is not OPO (OPO does not divide "
                "advantages by a standard deviation); set algo.scale=none"
            )


@option("algo", "dr_grpo", part="rlhf.objectives.dr_grpo:DrGRPO")
@dataclass(kw_only=True, slots=True)
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO: GRPO with unscaled advantages and a constant divisor of the loss."""

    name: str = "dr_grpo"
    kl_coef: float = 0.0
    scale: Scale = Scale.none


@option("algo", "dapo", part="rlhf.objectives.dapo:DAPO")
@dataclass(kw_only=True, slots=True)
class DAPOConfig(GRPOConfig):
    """DAPO: GRPO with a mean over all tokens and a larger upper bound of the ratio."""

    name: str = "dapo"
    clip_high: float = 0.28
    kl_coef: float = 0.0


@option("algo", "gspo", part="rlhf.objectives.gspo:GSPO")
@dataclass(kw_only=True, slots=True)
class GSPOConfig(GRPOConfig):
    """GSPO: GRPO with one ratio per response, the geometric mean of the ratios of its tokens."""

    sequence_ratio: ClassVar[bool] = True

    name: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0


@option("algo", "cispo", part="rlhf.objectives.cispo:CISPO")
@dataclass(kw_only=True, slots=True)
class CISPOConfig(GRPOConfig):
    """CISPO: REINFORCE on every token, weighted by the ratio of the token, which has an upper bound."""

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0
    kl_coef: float = 0.0

    def unused(self) -> tuple[str, ...]:
        """Return the keys that change only the clipped loss."""
        return CLIPPED_LOSS
