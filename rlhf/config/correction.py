"""Sections of what a policy-gradient loss does about samples of an older or another policy.

    w = exp(old - behaviour)    probability ratio of a token: trainer before the update / sampler

A bound on w is stated as a bound of w itself, never of its logarithm or its inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf.config.schema import Choice, Section, entry, number


class CorrectionKind(Choice):
    """The weight of a loss term, given the probability ratio w = trainer / sampler."""

    none = "none", "1"
    truncate = "truncate", "w, at least floor and at most cap"
    mask = "mask", "w if low <= w <= high, else 0; the token still counts in the mean"
    decoupled = "decoupled", "w, without a bound"


class Level(Choice):
    """The unit to which one importance weight applies."""

    token = "token", "the w of the token"
    sequence = "sequence", "the product of w over the tokens of the response"
    geometric = "geometric", "the geometric mean of w over the tokens of the response"


class Reject(Choice):
    """What is rejected: single tokens, or whole responses by a statistic of their tokens."""

    token = "token", "each token by its own value"
    sum = "sum", "a response by the sum over its tokens; for k1: by the product of w"
    mean = "mean", "a response by the mean over its tokens; for k1: by the geometric mean of w"
    max = "max", "a response if one of its tokens is out of bounds"
    m2 = "m2", "the tokens of largest (log w)^2, until its mean over the others is below reject_limit"


class Divergence(Choice):
    """The value of a token that a rejection compares with its bounds."""

    k1 = "k1", "w itself, between reject_low and reject_high"
    k2 = "k2", "(log w)^2 / 2, at most reject_limit"
    k3 = "k3", "w - 1 - log w, at most reject_limit"


class Anchor(Choice):
    """The policy in the denominator of the ratio u of the loss."""

    old = "old", "the trainer just before the update"
    behaviour = "behaviour", "the sampler: no forward pass for `old`, and u contains the lag"
    loglinear = "loglinear", "between sampler and current policy, in logarithms, by the lag of each token"


class Covariance(Choice):
    """What happens to tokens whose log-prob and advantage have a large covariance."""

    none = "none", "nothing"
    kl = "kl", "KL-Cov: they get a penalty coef |logp - old|; no ratio is clipped"
    clip = "clip", "Clip-Cov: a random share of them has no gradient"


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Section):
    """Importance weights (trainer / sampler) and rejection, for lag and for other numerics of the sampler."""

    kind: CorrectionKind = CorrectionKind.none
    level: Level = Level.token
    cap: float = number(2.0, "truncate: the largest weight", above=0)
    floor: float = number(0.0, "truncate: the smallest weight", least=0, most=1, added=True)
    low: float = entry(0.5, "kind=mask: smaller weights are set to 0")
    high: float = entry(2.0, "kind=mask: larger weights are set to 0")
    normalise: bool = entry(False, "divide the weights by their mean over the rollout batch", added=True)
    reject: Reject | None = entry(
        None, "what is left out of the sum and of the count of the loss; null: nothing", added=True
    )
    reject_by: Divergence = entry(Divergence.k1, added=True)
    reject_low: float = number(
        0.5,
        "reject_by=k1: smaller w is rejected (with reject=mean the geometric mean)",
        least=0,
        most=1,
        added=True,
    )
    reject_high: float | None = number(
        2.0, "reject_by=k1: larger w is rejected; null: no limit", least=1, remedy="2", added=True
    )
    reject_limit: float = number(
        0.04, "reject_by=k2 or k3, and reject=m2: larger values are rejected", above=0, added=True
    )
    reject_counted: bool = entry(
        False, "whether rejected tokens still count in the mean of the loss", added=True
    )

    @property
    def coupled(self) -> bool:
        """Whether a weight depends on other tokens of the rollout batch, or changes the count of the loss."""
        return self.reject is not None or (self.normalise and self.kind is not CorrectionKind.none)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if [low, high] does not contain 1, the weight of on-policy samples."""
        if not 0 <= self.low <= 1 <= self.high:
            rule = f"be >= 0 and <= 1, and {at}.high={self.high:g} >= 1"
            remedy = f"set {at}.low=0.5 {at}.high=2"
            yield self.refused(at, "low", rule, "1 is the weight of an on-policy sample", remedy=remedy)
        if self.cap < self.floor:
            rule = f"be >= {at}.floor={self.floor:g}"
            yield self.refused(at, "cap", rule, "weights are between the two")

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each key that is set and has no effect."""
        kind, by = f"{at}.kind={self.kind.value}", f"{at}.reject_by={self.reject_by.value}"
        uses = {
            "cap": (self.kind is CorrectionKind.truncate, kind, "truncate"),
            "floor": (self.kind is CorrectionKind.truncate, kind, "truncate"),
            "low": (self.kind is CorrectionKind.mask, kind, "mask"),
            "high": (self.kind is CorrectionKind.mask, kind, "mask"),
            "normalise": (self.kind is not CorrectionKind.none, kind, "truncate, mask and decoupled"),
        }
        if self.reject is None:
            nothing = f"{at}.reject=null"
            names = ("reject_by", "reject_low", "reject_high", "reject_limit", "reject_counted")
            uses |= {name: (False, nothing, "a rejection") for name in names}
        elif self.reject is Reject.m2:
            bounds = ("reject_by", "reject_low", "reject_high")
            uses |= {name: (False, f"{at}.reject=m2", "other rejections") for name in bounds}
        else:
            bands = self.reject_by is Divergence.k1
            uses |= {name: (bands, by, "k1") for name in ("reject_low", "reject_high")}
            uses["reject_limit"] = (not bands, by, "k2 and k3")
        yield from self.without_effect(at, uses)


@dataclass(kw_only=True, slots=True)
class CovarianceConfig(Section):
    """Limits on tokens that lower the entropy most: (A - mean A) (logp - mean logp) is large."""

    kind: Covariance = entry(Covariance.none, added=True)
    share: float = number(
        2e-3, "share of the response tokens of a rollout batch that is limited", above=0, most=1, added=True
    )
    low: float = number(1.0, "kind=clip: the smallest covariance of a limited token", added=True)
    high: float = number(5.0, "kind=clip: the largest covariance of a limited token", added=True)
    coef: float = number(1.0, "kind=kl: weight of the penalty |logp - old|", least=0, added=True)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if no covariance is between the bounds."""
        if self.kind is Covariance.clip and self.low >= self.high:
            reason = "the covariance of a limited token is between the two"
            remedy = f"set {at}.low=1 {at}.high=5"
            yield self.refused(at, "low", f"be < {at}.high={self.high:g}", reason, remedy=remedy)

    def warnings(self, at: str) -> Iterator[str]:
        """Yield a warning for each key that is set and has no effect."""
        kind = f"{at}.kind={self.kind.value}"
        uses = {
            "share": (self.kind is not Covariance.none, kind, "kl and clip"),
            "low": (self.kind is Covariance.clip, kind, "clip"),
            "high": (self.kind is Covariance.clip, kind, "clip"),
            "coef": (self.kind is Covariance.kl, kind, "kl"),
        }
        yield from self.without_effect(at, uses)
