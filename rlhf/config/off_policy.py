"""Sections of the algorithms that were designed for samples of an older policy (`algo=...`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf.config.algo import AlgoConfig, Ties
from rlhf.config.correction import Anchor, Level
from rlhf.config.policy_gradient import CLIP_RANGE, CLIPPED_LOSS, GRPOConfig, Scale
from rlhf.config.schema import Choice, entry, number, option


class M2POForm(Choice):
    """How the second moment of log-ratios is limited."""

    mask = "mask", "the tokens of largest ratio have no loss, as in the paper"
    clip = "clip", "all ratios are clipped at one bound, as in the code of the authors"


class DPPODivergence(Choice):
    """The divergence of a token's probability, this token against all others."""

    tv = "tv", "|p - q|"
    kl = "kl", "KL(q || p) of the two outcomes"


_DEFAULT_LIMITS = {
    DPPODivergence.tv: 0.15,
    DPPODivergence.kl: 0.05,
}  # values of the authors, arXiv 2602.04879


class OAPLAnchor(Choice):
    """The policy to which OAPL regresses."""

    behaviour = "behaviour", "the sampler: OAPL"
    reference = "reference", "the frozen reference: the loss of A*-PO"


@dataclass(kw_only=True, slots=True)
class UnclippedConfig(GRPOConfig):
    """The keys of the algorithms whose loss is a ratio to the sampler, limited in another way than PPO's."""

    kl_coef: float = 0.0
    anchor: Anchor = Anchor.behaviour

    def unused(self) -> tuple[str, ...]:
        """Return the keys of PPO's clipped loss."""
        return (*CLIP_RANGE, *CLIPPED_LOSS)


@option("algo", "m2po", part="rlhf.objectives.m2po:M2PO")
@dataclass(kw_only=True, slots=True)
class M2POConfig(UnclippedConfig):
    """M2PO: a policy gradient whose ratios to the sampler have a bounded second moment."""

    name: str = "m2po"
    form: M2POForm = M2POForm.mask
    limit: float = number(
        0.04, above=0, means="bound of the mean of (log ratio)^2 over the tokens whose ratio rises with A"
    )

    def unused(self) -> tuple[str, ...]:
        """Return the keys of PPO's clipped loss, and `anchor`: the limited ratio is that to the sampler."""
        return (*UnclippedConfig.unused(self), "anchor")


@option("algo", "topr", part="rlhf.objectives.topr:TOPR")
@dataclass(kw_only=True, slots=True)
class TOPRConfig(UnclippedConfig):
    """TOPR: REINFORCE; only the weights of responses with a negative advantage are ratios, at most 1."""

    name: str = "topr"
    scale: Scale = Scale.none
    level: Level = entry(Level.sequence, means="the unit of one ratio")


@option("algo", "dppo", part="rlhf.objectives.dppo:DPPO")
@dataclass(kw_only=True, slots=True)
class DPPOConfig(UnclippedConfig):
    """DPPO: tokens whose probability moved too far from the sampler's are masked, instead of clipped."""

    name: str = "dppo"
    divergence: DPPODivergence = DPPODivergence.tv
    limit_low: float | None = number(
        None, above=0, means="A < 0: largest fall in probability; null: tv 0.15, kl 0.05", remedy="null"
    )
    limit_high: float | None = number(
        None, above=0, means="A > 0: largest rise in probability; null: tv 0.15, kl 0.05", remedy="null"
    )
    cap: float = number(3.0, above=0, means="the largest ratio that weighs a token")

    @property
    def limits(self) -> tuple[float, float]:
        """The limits `limit_low` and `limit_high`; where they are null, the default of the divergence."""
        default = _DEFAULT_LIMITS[self.divergence]
        low, high = (default if limit is None else limit for limit in (self.limit_low, self.limit_high))
        return low, high


@option("algo", "scalerl", part="rlhf.objectives.scalerl:ScaleRL")
@dataclass(kw_only=True, slots=True)
class ScaleRLConfig(UnclippedConfig):
    """ScaleRL: truncated ratios as weights, advantages scaled over the batch, a mean over prompts."""

    name: str = "scalerl"
    scale: Scale = Scale.batch
    ties: Ties = Ties.drop
    cap: float = number(5.0, above=0, means="the largest ratio that weighs a token")


@option("algo", "oapl", part="rlhf.objectives.oapl:OAPL")
@dataclass(kw_only=True, slots=True)
class OAPLConfig(AlgoConfig):
    """OAPL: regression of log-ratios on optimal advantages; no ratio weights and no clipping."""

    min_samples: ClassVar[int] = 2
    learns_from_ties: ClassVar[bool] = True

    name: str = "oapl"
    samples_per_prompt: int = 4
    anchor: OAPLAnchor = OAPLAnchor.behaviour
    beta_value: float = number(
        1.0, above=0, means="temperature of the mean of exponentials that estimates the optimal value"
    )
    beta: float = number(1e-3, above=0, means="factor of the log-ratio that is compared with the advantage")

    @property
    def needs_sampler(self) -> bool:
        """Whether the regression is anchored at the sampler."""
        return self.anchor is OAPLAnchor.behaviour
