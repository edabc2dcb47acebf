"""Settings of the objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Section, option
from rlhf.config.scorer import RewardModelScorerConfig

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.objectives.objective import Objective


class Trains(Enum):
    """Which model a run trains, and so what it starts from and how it is evaluated."""

    base = "base"  # a language model from the base model (or from nothing)
    policy = "policy"  # the policy, against its frozen reference
    reward = "reward"  # a reward model, from the policy's weights


class Data(Enum):
    """What one example of the training data holds."""

    prompts = "prompts"  # a prompt; the generator responds
    references = "references"  # a prompt and its reference response
    preferences = "preferences"  # a prompt, a chosen and a rejected response


class DPOLoss(Enum):
    """The loss on the margin of a pair."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


class Ties(Enum):
    """What becomes of a prompt whose best and worst scores are equal."""

    drop = "drop"  # it leaves the sum and the count
    keep = "keep"  # it counts: in dpo first best against last worst, as the original did


class KLIn(Enum):
    """Where the KL to the reference is penalised."""

    reward = "reward"
    loss = "loss"


class KLEstimator(Enum):
    """How the KL of a token is estimated from a sample; k3 is never negative, and varies less."""

    k1 = "k1"  # logp - ref
    k3 = "k3"  # exp(ref - logp) - 1 + logp - ref


class Scale(Enum):
    """The standard deviation that rewards minus their group's mean are divided by."""

    group = "group"
    batch = "batch"
    none = "none"


class RLOOLoss(Enum):
    """What is minimised for a response."""

    clip = "clip"  # the ratio of the whole response, clipped
    reinforce = "reinforce"  # its log-prob


class ValueFrom(Enum):
    """What the value model is at the start."""

    reward = "reward"  # the reward model
    policy = "policy"  # the policy, with values of 0


class CorrectionKind(Enum):
    """What is done with the importance weight w = trainer / sampler."""

    none = "none"
    truncate = "truncate"  # cut off at `cap`
    mask = "mask"  # 0 outside [low, high]
    decoupled = "decoupled"  # taken as it is


class Level(Enum):
    """What has one importance weight."""

    token = "token"
    sequence = "sequence"


@dataclass(kw_only=True, slots=True)
class AlgoConfig(Section):
    """What every objective has. `samples_per_prompt` is K."""

    trains: ClassVar[Trains] = Trains.policy
    data: ClassVar[Data] = Data.prompts
    supervised: ClassVar[bool] = False  # counts epochs and examples; needs generator=dataset
    min_samples: ClassVar[int] = 1
    keeps: ClassVar[int | None] = None  # samples of a prompt that are trained on; None: all K

    name: str = MISSING
    samples_per_prompt: int = 1

    def build(self) -> Objective:
        """Make the objective; this is where torch is first imported."""
        raise NotImplementedError

    def problems(self, cfg: Config) -> Iterator[str]:
        """Too few samples of a prompt."""
        if self.samples_per_prompt < self.min_samples:
            reason = "it ranks completions of one prompt" if self.min_samples == 2 else "it needs a sample"
            yield (
                f"algo.samples_per_prompt must be >= {self.min_samples} for {self.name} ({reason}), "
                f"got {self.samples_per_prompt}; set algo.samples_per_prompt={self.min_samples}"
            )


def positive(key: str, value: float | None, meaning: str, remedy: str) -> Iterator[str]:
    """A number that must be above 0; None passes."""
    if value is not None and not value > 0:
        yield f"{key} must be > 0 ({meaning}), got {value:g}; set {key}={remedy}"


@option("algo", "dpo")
@dataclass(kw_only=True, slots=True)
class DPOConfig(AlgoConfig):
    """Online DPO: best against worst of K samples. With `generator=dataset`: offline DPO on stored pairs."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 2

    name: str = "dpo"
    samples_per_prompt: int = 2
    loss_type: DPOLoss = DPOLoss.sigmoid
    beta: float = 0.1
    label_smoothing: float = 0.0  # part of the labels taken to be wrong: sigmoid and robust
    length_normalised: bool = False  # log-ratios are divided by the tokens of their response
    ties: Ties = Ties.drop

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.dpo import OnlineDPO

        return OnlineDPO(self)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, beta, and the part of wrong labels."""
        yield from AlgoConfig.problems(self, cfg)
        yield from positive("algo.beta", self.beta, "it scales the log-ratio to the reference", "0.1")
        if not 0 <= self.label_smoothing < 0.5:
            yield (
                "algo.label_smoothing must be from 0 to below 0.5 (a part of the labels; with half of them "
                f"wrong there is nothing to learn), got {self.label_smoothing:g}; set algo.label_smoothing=0"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Label smoothing of a loss that has none."""
        if self.label_smoothing and self.loss_type in (DPOLoss.ipo, DPOLoss.hinge):
            yield f"algo.label_smoothing has no effect with algo.loss_type={self.loss_type.value}"


@option("algo", "bok")
@dataclass(kw_only=True, slots=True)
class BestOfKConfig(AlgoConfig):
    """Best-of-K fine-tuning: maximum likelihood of the best of K samples."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 1

    name: str = "bok"
    samples_per_prompt: int = 2
    ties: Ties = Ties.drop

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.bok import BestOfK

        return BestOfK(self)


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Section):
    """Importance weights trainer / sampler, for lag and for samplers that compute otherwise."""

    kind: CorrectionKind = CorrectionKind.none
    level: Level = Level.token
    cap: float = 2.0  # truncate: the largest weight
    low: float = 0.5  # mask: weights below count as 0
    high: float = 2.0  # mask: weights above count as 0

    def problems(self, cfg: Config) -> Iterator[str]:
        """A cap or a band that nothing passes."""
        yield from positive("algo.correction.cap", self.cap, "weights are cut off there", "2")
        if not 0 <= self.low <= 1 <= self.high:
            yield (
                "algo.correction.low and algo.correction.high must hold 1 between them (the weight of an "
                f"on-policy sample), got {self.low:g} and {self.high:g}; set algo.correction.low=0.5 "
                "algo.correction.high=2"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Settings of another kind."""
        default = CorrectionConfig()
        for kind, names in ((CorrectionKind.truncate, ("cap",)), (CorrectionKind.mask, ("low", "high"))):
            for name in names:
                if self.kind is not kind and getattr(self, name) != getattr(default, name):
                    yield (
                        f"algo.correction.{name} has no effect with algo.correction.kind={self.kind.value} "
                        f"(it belongs to {kind.value})"
                    )


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig(AlgoConfig):
    """What policy-gradient objectives share."""

    sequence_ratio: ClassVar[bool] = False  # one ratio a response

    clip_low: float = 0.2  # ratios are clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    kl_coef: float = 0.0  # beta
    kl_in: KLIn = KLIn.loss
    kl_estimator: KLEstimator = KLEstimator.k3
    kl_unbiased: bool = True  # in the loss: times the ratio, so that its gradient is that of the KL
    normalize_scores: bool = False  # to mean 0 and standard deviation 1 over the rollout batch
    clip_scores: float | None = None  # to +- this, after normalising; null: not
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and bounds; samples whose sampler is not known."""
        yield from AlgoConfig.problems(self, cfg)
        if not cfg.generator.rollouts:
            yield (
                f"generator must be one that samples for algo={self.name} (ratios are taken to the sampler's "
                f"log-probs), got {cfg.generator.name}; set generator=hf"
            )
        if not 0 <= self.clip_low <= 1:
            yield (
                "algo.clip_low must be from 0 to 1 (ratios are clipped at 1 - clip_low), "
                f"got {self.clip_low:g}; set algo.clip_low=0.2"
            )
        yield from positive("algo.clip_high", self.clip_high, "ratios are clipped at 1 + clip_high", "0.2")
        yield from positive("algo.clip_scores", self.clip_scores, "scores are clipped to +- this", "null")
        if self.kl_coef < 0:
            yield (
                "algo.kl_coef must be >= 0 (it weighs the penalty on the KL to the reference), "
                f"got {self.kl_coef:g}; set algo.kl_coef=0.05"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """A penalty that pulls nowhere, and weights of tokens in a loss of sequences."""
        in_loss = self.kl_coef > 0 and self.kl_in is KLIn.loss
        if in_loss and self.kl_estimator is KLEstimator.k1 and not self.kl_unbiased:
            yield (
                "algo.kl_estimator=k1 with algo.kl_unbiased=false has a gradient of 0 on average (that of "
                "log-probs), so nothing holds the policy near the reference; set algo.kl_unbiased=true"
            )
        correction = self.correction
        if (
            self.sequence_ratio
            and correction.kind is not CorrectionKind.none
            and correction.level is Level.token
        ):
            yield (
                f"algo.correction.level=token with algo={self.name} averages weights of tokens in a loss of "
                "whole responses; set algo.correction.level=sequence"
            )


@option("algo", "ppo")
@dataclass(kw_only=True, slots=True)
class PPOConfig(PolicyGradientConfig):
    """PPO: a value model, generalised advantage estimation."""

    name: str = "ppo"
    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1
    kl_target: float | None = None  # KL of a response that kl_coef moves towards; null: it is fixed
    kl_horizon: float = 10000  # episodes; the larger, the slower it moves
    gamma: float = 1.0
    lam: float = 0.95  # lambda of the advantage estimation
    vf_coef: float = 0.1  # weight of the value loss
    clip_value: float = 0.2  # values are clipped to +- this around those before the update
    whiten_advantages: bool = True
    whiten_rewards: bool = False  # keeps their mean
    end_state: bool = True  # the state after the end is a step of its own, which gets the score
    value_from: ValueFrom | None = None  # null: the reward model where the scorer is one, else the policy
    value_lr: float | None = None  # learning rate of the value model; null: optim.lr

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.ppo import PPO

        return PPO(self)

    def starts_value(self, cfg: Config) -> ValueFrom:
        """What the value model is at the start of the run `cfg`."""
        if self.value_from is not None:
            return self.value_from
        scored = cfg.scorer.reads_reward or isinstance(cfg.scorer, RewardModelScorerConfig)
        return ValueFrom.reward if scored else ValueFrom.policy

    def reward_model(self, cfg: Config) -> str | None:
        """The reward model that the value model may start as."""
        own = cfg.scorer.path if isinstance(cfg.scorer, RewardModelScorerConfig) else None
        return own or cfg.model.reward

    def problems(self, cfg: Config) -> Iterator[str]:
        """The same, and what the value model and the advantages need."""
        yield from PolicyGradientConfig.problems(self, cfg)
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            if not 0 <= value <= 1:
                yield f"algo.{key} must be from 0 to 1 (it discounts), got {value:g}; set algo.{key}=1"
        yield from positive("algo.clip_value", self.clip_value, "values are clipped to +- this", "0.2")
        yield from positive("algo.value_lr", self.value_lr, "the value model's step size", "null")
        yield from positive("algo.kl_target", self.kl_target, "a KL that the policy may have", "6")
        yield from positive("algo.kl_horizon", self.kl_horizon, "episodes", "10000")
        if self.vf_coef < 0:
            yield (
                f"algo.vf_coef must be >= 0 (it weighs the value loss), got {self.vf_coef:g}; "
                "set algo.vf_coef=0.1"
            )
        if self.kl_target is not None and not self.kl_coef:
            yield (
                "algo.kl_coef must be > 0 with algo.kl_target (the coefficient moves by factors), got 0; "
                "set algo.kl_coef=0.05"
            )
        made = cfg.makes_models and cfg.scorer.reads_reward
        if self.value_from is ValueFrom.reward and not made and self.reward_model(cfg) is None:
            yield (
                "model.reward must name a reward model for algo.value_from=reward (the value model starts as "
                "it), got null; set model.reward=<hub name or folder> or algo.value_from=policy"
            )


@option("algo", "rloo")
@dataclass(kw_only=True, slots=True)
class RLOOConfig(PolicyGradientConfig):
    """RLOO: REINFORCE with the mean of a prompt's other samples as baseline."""

    min_samples: ClassVar[int] = 2
    sequence_ratio: ClassVar[bool] = True

    name: str = "rloo"
    samples_per_prompt: int = 2
    loss_type: RLOOLoss = RLOOLoss.clip
    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.rloo import RLOO

        return RLOO(self)


@option("algo", "grpo")
@dataclass(kw_only=True, slots=True)
class GRPOConfig(PolicyGradientConfig):
    """GRPO: PPO's clipped ratio with advantages from the group of a prompt's samples."""

    min_samples: ClassVar[int] = 2

    name: str = "grpo"
    samples_per_prompt: int = 4
    kl_coef: float = 0.04
    scale: Scale = Scale.group
    ties: Ties = Ties.keep

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.grpo import GRPO

        return GRPO(self)


@option("algo", "dr_grpo")
@dataclass(kw_only=True, slots=True)
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO: GRPO with advantages that are not scaled, and a constant divisor."""

    name: str = "dr_grpo"
    kl_coef: float = 0.0
    scale: Scale = Scale.none

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.dr_grpo import DrGRPO

        return DrGRPO(self)


@option("algo", "dapo")
@dataclass(kw_only=True, slots=True)
class DAPOConfig(GRPOConfig):
    """DAPO: GRPO with a mean over all tokens, and more room upwards."""

    name: str = "dapo"
    clip_high: float = 0.28
    kl_coef: float = 0.0

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.dapo import DAPO

        return DAPO(self)


@option("algo", "gspo")
@dataclass(kw_only=True, slots=True)
class GSPOConfig(GRPOConfig):
    """GSPO: GRPO with one ratio a response, the geometric mean of its tokens'."""

    sequence_ratio: ClassVar[bool] = True

    name: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.gspo import GSPO

        return GSPO(self)


@option("algo", "cispo")
@dataclass(kw_only=True, slots=True)
class CISPOConfig(GRPOConfig):
    """CISPO: REINFORCE on every token, weighted by its ratio, which is cut off above."""

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0
    kl_coef: float = 0.0

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.cispo import CISPO

        return CISPO(self)


@option("algo", "sft")
@dataclass(kw_only=True, slots=True)
class SFTConfig(AlgoConfig):
    """Supervised fine-tuning: cross-entropy of the reference response, EOS included."""

    trains: ClassVar[Trains] = Trains.base
    data: ClassVar[Data] = Data.references
    supervised: ClassVar[bool] = True

    name: str = "sft"

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.sft import SFT

        return SFT(self)


@option("algo", "reward")
@dataclass(kw_only=True, slots=True)
class RewardConfig(AlgoConfig):
    """Reward modelling: Bradley-Terry on chosen and rejected."""

    trains: ClassVar[Trains] = Trains.reward
    data: ClassVar[Data] = Data.preferences
    supervised: ClassVar[bool] = True
    min_samples: ClassVar[int] = 2

    name: str = "reward"
    samples_per_prompt: int = 2

    def build(self) -> Objective:
        """Make the objective."""
        from rlhf.objectives.reward import RewardModelling

        return RewardModelling(self)
