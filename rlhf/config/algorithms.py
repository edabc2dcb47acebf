"""Sections of the algorithms (`algo=...`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from omegaconf import MISSING

from rlhf.config.schema import Choice, Section, entry, number, option, value_at
from rlhf.config.scorers import ServedTeacherConfig


class Trains(Choice):
    """The model that a run trains; the choice determines the initial weights and the evaluation."""

    base = "base", "a language model, from the base model (or from random weights)"
    policy = "policy", "the policy, compared with its frozen reference"
    reward = "reward", "a reward model, from the policy's weights"


class Data(Choice):
    """The content of one example of the training data."""

    prompts = "prompts", "a prompt; the generator samples the responses"
    references = "references", "a prompt and its reference response"
    preferences = "preferences", "a prompt, a chosen and a rejected response"


class DPOLoss(Choice):
    """The loss on the margin of a preference pair."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"
    sppo = "sppo", "each log-ratio is regressed on how often its response wins (arXiv 2405.00675)"


# The weight that multiplies the loss of a preference pair. A class body cannot name a member `is`, a keyword.
PairWeighting = Enum("PairWeighting", {"none": "none", "is": "is", "wpo": "wpo"})


class Ties(Choice):
    """What to do with a prompt whose best and worst scores are equal."""

    drop = "drop", "exclude the prompt from the loss and from the count of prompts"
    keep = "keep", "include the prompt; dpo then compares the first sample with the last sample"


@dataclass(kw_only=True, slots=True)
class AlgoConfig(Section):
    """The keys that every algorithm has. `samples_per_prompt` is K."""

    trains: ClassVar[Trains] = Trains.policy
    data: ClassVar[Data] = Data.prompts
    supervised: ClassVar[bool] = False  # True: counts epochs and examples, and requires generator=dataset
    min_samples: ClassVar[int] = 1  # smallest K
    keeps: ClassVar[int | None] = None  # number of samples of a prompt that are trained on; None: all K

    pairwise: ClassVar[bool] = False  # True: the loss compares two responses of a prompt
    learns_from_ties: ClassVar[bool] = False  # True: prompts whose scores are all equal are trained on, too
    distils: ClassVar[bool] = False  # True: model.reference is a teacher, another model than the policy
    needs_sampler: ClassVar[bool] = False  # True: the loss needs the sampler's log-probs
    teacher_url: ClassVar[str | None] = None  # of the server that runs the reference; None: the run loads it

    name: str = MISSING
    samples_per_prompt: int = entry(1, "K, responses of one prompt")
    tie_tolerance: float | None = number(None, least=0, remedy="null", added=True)
    """scores a and b tie if |a - b| <= tie_tolerance * max(1, |a|, |b|); 0: only equal scores tie; null: for
    a reward model 1e-5 in float32, 1e-2 in bfloat16, 1e-3 in float16, else 0"""

    @property
    def value_lr(self) -> float | None:
        """The learning rate of the value model; None: `optim.lr`, or there is no value model."""
        return None

    def corrections(self) -> list[str]:
        """Return settings that make updates on samples of older weights more stable."""
        return []

    def rules(self, at: str) -> Iterator[str]:
        """Yield the errors of single fields, then an error if there are too few samples of a prompt."""
        if self.samples_per_prompt < self.min_samples:
            reason = "it ranks completions of one prompt" if self.min_samples == 2 else "it needs a sample"
            rule = f"be >= {self.min_samples} for {self.name}"
            yield self.refused(at, "samples_per_prompt", rule, reason, self.min_samples)


@option("algo", "dpo", part="rlhf.objectives.dpo:OnlineDPO")
class DPOConfig(AlgoConfig):
    """Online DPO on the best and the worst of K samples. With `generator=dataset`: offline DPO on pairs."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 2
    pairwise: ClassVar[bool] = True

    samples_per_prompt: int = 2
    loss_type: DPOLoss = DPOLoss.sigmoid
    beta: float = number(0.1, above=0)
    """strength of the KL constraint; a higher value keeps the policy near the reference"""
    label_smoothing: float = number(0.0, when="loss_type=sigmoid|robust", least=0, below=0.5)
    """fraction of labels that are assumed wrong; sigmoid and robust"""
    wins: float = number(1.0, when="loss_type=sppo", least=0.5, most=1, added=True)
    """probability that the chosen response wins against the rejected one"""
    length_normalised: bool = entry(False, "divide each log-ratio by the number of tokens of its response")
    ties: Ties = Ties.drop
    weighting: PairWeighting = entry(PairWeighting.none, added=True)
    """weight of the loss of a pair: `is`: probability ratio of policy to sampler, of both responses together;
    `wpo`: how probable both responses are under the policy, per token; `none`: 1"""
    weighting_eps: float = number(1.0, when="weighting=is", least=0, added=True)
    """weighting=is: weights have the upper bound exp(2 weighting_eps)"""
    weighting_clamp: float | None = number(1.0, when="weighting=wpo", above=0, added=True)
    """weighting=wpo: upper bound of the weights; null: no bound"""

    def corrections(self) -> list[str]:
        """Return the setting that weights pairs, if they have no weights."""
        return ["algo.weighting=is"] if self.weighting is PairWeighting.none else []


@option("algo", "bok", part="rlhf.objectives.bok:BestOfK")
class BestOfKConfig(AlgoConfig):
    """Best-of-K fine-tuning: maximum likelihood of the best of K samples."""

    min_samples: ClassVar[int] = 2
    keeps: ClassVar[int | None] = 1

    samples_per_prompt: int = 2
    ties: Ties = Ties.drop


@option("algo", "sft", part="rlhf.objectives.sft:SFT")
class SFTConfig(AlgoConfig):
    """Supervised fine-tuning: cross-entropy of the reference response, EOS included."""

    trains: ClassVar[Trains] = Trains.base
    data: ClassVar[Data] = Data.references
    supervised: ClassVar[bool] = True


@option("algo", "reward", part="rlhf.objectives.reward_modelling:RewardModelling")
class RewardConfig(AlgoConfig):
    """Reward modelling: Bradley-Terry loss on chosen and rejected responses."""

    trains: ClassVar[Trains] = Trains.reward
    data: ClassVar[Data] = Data.preferences
    supervised: ClassVar[bool] = True
    min_samples: ClassVar[int] = 2
    pairwise: ClassVar[bool] = True

    samples_per_prompt: int = 2


# Sections of the policy-gradient algorithms (`algo=...`).


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
    decoupled = "decoupled", "of each part of a weighted score by itself, then summed (arXiv 2601.05242)"
    none = "none", "0: the advantage is the reward"


class Mean(Choice):
    """Over what the loss is a mean."""

    tokens = "tokens", "the tokens of the minibatch"
    responses = "responses", "the tokens of a response, then responses"
    prompts = "prompts", "the tokens of a prompt's responses, then prompts"
    constant = "constant", "responses times their largest allowed length"


class RLOOLoss(Choice):
    """The policy term in the loss of a response."""

    clip = "clip", "the clipped ratio of the whole response"
    reinforce = "reinforce", "the log-prob of the response"


class ValueFrom(Choice):
    """The weights that the value model starts from."""

    reward = "reward", "the reward model"
    policy = "policy", "the policy, with a head whose initial values are 0"


# What a policy-gradient loss does about samples of an older or another policy.
#
#     w = exp(old - behaviour)    probability ratio of a token: trainer before the update / sampler
#
# A bound on w is stated as a bound of w itself, never of its logarithm or its inverse.


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
    linear = "linear", "as loglinear, but between the probabilities"


class Covariance(Choice):
    """What happens to tokens whose log-prob and advantage have a large covariance."""

    none = "none", "nothing"
    kl = "kl", "KL-Cov: they get a penalty coef |logp - old|; no ratio is clipped"
    clip = "clip", "Clip-Cov: a random share of them has no gradient"


_BAND = "reject!=null", "reject!=m2", "reject_by=k1"  # conditions of the bounds of w
_LIMIT = "reject!=null", "reject=m2 or reject_by!=k1"  # of the limit of other values


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Section):
    """Importance weights (trainer / sampler) and rejection, for lag and for other numerics of the sampler."""

    kind: CorrectionKind = CorrectionKind.none
    level: Level = Level.token
    cap: float = number(2.0, "truncate: the largest weight", "kind=truncate", above=0)
    floor: float = number(0.0, "truncate: the smallest weight", "kind=truncate", least=0, most=1, added=True)
    low: float = entry(0.5, "kind=mask: smaller weights are set to 0", "kind=mask")
    high: float = entry(2.0, "kind=mask: larger weights are set to 0", "kind=mask")
    normalise: bool = entry(False, when="kind!=none", added=True)
    """divide the weights by their mean over the rollout batch"""
    reject: Reject | None = entry(None, added=True)
    """what is left out of the sum and of the count of the loss; null: nothing"""
    reject_by: Divergence = entry(Divergence.k1, when=_BAND[:2], added=True)
    reject_low: float = number(0.5, when=_BAND, least=0, most=1, added=True)
    """reject_by=k1: smaller w is rejected (with reject=mean the geometric mean)"""
    reject_high: float | None = number(2.0, when=_BAND, least=1, remedy="2", added=True)
    """reject_by=k1: larger w is rejected; null: no limit"""
    reject_limit: float = number(0.04, when=_LIMIT, above=0, added=True)
    """reject_by=k2 or k3, and reject=m2: larger values are rejected"""
    veto: float | None = number(None, above=0, remedy="1", added=True)
    """a response is rejected, too, if w - 1 - log w of one of its tokens exceeds this; null: off"""
    reject_counted: bool = entry(False, when="reject!=null or veto!=null", added=True)
    """whether rejected tokens still count in the mean of the loss"""

    @property
    def coupled(self) -> bool:
        """Whether a weight depends on other tokens of the rollout batch, or changes the count of the loss."""
        rejects = self.reject is not None or self.veto is not None
        return rejects or (self.normalise and self.kind is not CorrectionKind.none)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if [low, high] does not contain 1, the weight of on-policy samples."""
        if not 0 <= self.low <= 1 <= self.high:
            rule = f"be >= 0 and <= 1, and {at}.high={self.high:g} >= 1"
            remedy = f"set {at}.low=0.5 {at}.high=2"
            yield self.refused(at, "low", rule, "1 is the weight of an on-policy sample", remedy=remedy)
        if self.cap < self.floor:
            rule = f"be >= {at}.floor={self.floor:g}"
            yield self.refused(at, "cap", rule, "weights are between the two")


@dataclass(kw_only=True, slots=True)
class CovarianceConfig(Section):
    """Limits on tokens that lower the entropy most: (A - mean A) (logp - mean logp) is large."""

    kind: Covariance = entry(Covariance.none, added=True)
    share: float = number(2e-3, when="kind!=none", above=0, most=1, added=True)
    """share of the response tokens of a rollout batch that is limited"""
    low: float = number(1.0, "kind=clip: the smallest covariance of a limited token", "kind=clip", added=True)
    high: float = number(5.0, "kind=clip: the largest covariance of a limited token", "kind=clip", added=True)
    coef: float = number(1.0, "kind=kl: weight of the penalty |logp - old|", "kind=kl", least=0, added=True)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if no covariance is between the bounds."""
        if self.kind is Covariance.clip and self.low >= self.high:
            reason = "the covariance of a limited token is between the two"
            remedy = f"set {at}.low=1 {at}.high=5"
            yield self.refused(at, "low", f"be < {at}.high={self.high:g}", reason, remedy=remedy)


_CLIP_RANGE = ("clip_low", "clip_high")
_CLIPPED_LOSS = ("dual_clip", "covariance.kind")  # options of PPO's clipped loss
_CORRECTION = ("correction.kind", "correction.reject", "correction.veto")


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig(AlgoConfig):
    """The keys that policy-gradient algorithms share."""

    needs_sampler: ClassVar[bool] = True
    sequence_ratio: ClassVar[bool] = False  # the loss is one of whole responses
    has_ratio: ClassVar[bool] = True  # whether the policy term of the loss has a ratio
    unused: ClassVar[tuple[str, ...]] = ()  # the keys of the clipped loss that this loss does not use

    clip_low: float = number(0.2, "ratios are clipped at 1 - clip_low", least=0, most=1)
    clip_high: float = number(0.2, "ratios are clipped at 1 + clip_high", above=0)
    kl_coef: float = number(0.0, "beta, weight of the KL penalty; 0: no penalty", least=0, remedy="0.05")
    kl_in: KLIn = KLIn.loss
    kl_estimator: KLEstimator = KLEstimator.k3
    kl_unbiased: bool = entry(True)
    """kl_in=loss: multiply the KL estimate by the ratio, for the gradient of the KL"""
    normalize_scores: bool = entry(False)
    """scale scores to mean 0 and standard deviation 1 over the rollout batch"""
    clip_scores: float | None = number(None, above=0)
    """limit of the absolute value of scores, applied after normalising; null: no limit"""
    anchor: Anchor = entry(Anchor.old, added=True)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    off_policy_mask: float | None = number(None, least=0, remedy="0.5", added=True)
    """responses with A < 0 get no policy loss if the mean of sampler - policy log-probs of their tokens
    exceeds this; null: off"""
    dual_clip: float | None = number(None, above=1, remedy="3", added=True)
    """with A < 0 the loss of a token is at most -dual_clip A; null: no limit"""
    entropy_coef: float = number(0.0, "weight of the entropy bonus of the policy", least=0, added=True)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    square_coef: float = number(0.0, "weight of (log u)^2 in the loss of a token", least=0, added=True)

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if two settings contradict each other, or if the loss ignores a key that is set."""
        correction, limits, unused, default = self.correction, self.covariance, self.unused, type(self)()
        corrected = correction.kind is not CorrectionKind.none and "correction.kind" not in unused
        if self.anchor is Anchor.behaviour and corrected:
            reason = "the ratio of the loss is the weight already"
            yield self.refused(at, "correction.kind", "be none with algo.anchor=behaviour", reason)
        if self.anchor in (Anchor.loglinear, Anchor.linear) and correction.coupled:
            rule = f"not be {self.anchor.value} with algo.correction.reject or algo.correction.normalise"
            yield self.refused(at, "anchor", rule, "they need the log-probs that this anchor saves", "old")
        if self.sequence_ratio and limits.kind is not Covariance.none and "covariance.kind" not in unused:
            reason = "it limits single tokens, but the ratio is that of a whole response"
            yield self.refused(at, "covariance.kind", f"be none for algo={self.name}", reason)
        if self.anchor is not Anchor.old and not self.reads_anchor:
            reason = "this loss has no ratio; algo.correction corrects for older samples"
            yield self.refused(at, "anchor", f"be old for algo={self.name} without a ratio", reason)
        for key in unused:
            if value_at(self, key) != value_at(default, key):
                rule, reason = f"not be set for algo={self.name}", "its loss does not use it"
                yield self.refused(at, key, rule, reason, value_at(default, key))

    def corrections(self) -> list[str]:
        """Return the setting that weights samples of older weights, if the loss does not correct for them."""
        if self.correction.kind is not CorrectionKind.none or self.anchor is not Anchor.old:
            return []
        level = " algo.correction.level=sequence" if self.sequence_ratio else ""
        return [f"algo.correction.kind=truncate{level}"]

    @property
    def level(self) -> Level:
        """The unit of one ratio u."""
        return Level.token

    @property
    def reads_anchor(self) -> bool:
        """Whether the policy term, the importance weights or another term of the loss read the anchor."""
        weighted = self.correction.kind is not CorrectionKind.none
        ratio_of_kl = self.kl_coef > 0 and self.kl_in is KLIn.loss and self.kl_unbiased
        return self.has_ratio or weighted or ratio_of_kl or self.square_coef > 0


@option("algo", "ppo", part="rlhf.objectives.ppo:PPO")
class PPOConfig(PolicyGradientConfig):
    """PPO: a value model and generalised advantage estimation."""

    learns_from_ties: ClassVar[bool] = True

    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1
    kl_target: float | None = number(None, above=0, remedy="6")
    """target KL of a response, to which kl_coef adapts; null: kl_coef is constant"""
    kl_horizon: float = number(10000, above=0)
    """episodes over which kl_coef adapts; a larger value adapts more slowly"""
    gamma: float = number(1.0, "discount of later rewards", least=0, most=1)
    lam: float = number(0.95, "lambda of the advantage estimation", least=0, most=1)
    vf_coef: float = number(0.1, "weight of the value loss", least=0)
    clip_value: float = number(0.2, above=0)
    """largest difference of new and old values before the value loss is clipped"""
    whiten_advantages: bool = entry(True, "scale advantages to mean 0 and standard deviation 1")
    whiten_rewards: bool = entry(False, "scale rewards to standard deviation 1; keep their mean")
    end_state: bool = entry(True)
    """the state after the last token is a separate step, which receives the score"""
    value_from: ValueFrom | None = entry(None)
    """null: the reward model if the scorer uses one, else the policy"""
    value_lr: float | None = number(None, above=0, remedy="null")
    """learning rate of the value model; null: optim.lr"""


@option("algo", "rloo", part="rlhf.objectives.rloo:RLOO")
class RLOOConfig(PolicyGradientConfig):
    """RLOO: REINFORCE with the mean reward of a prompt's other samples as baseline."""

    min_samples: ClassVar[int] = 2
    sequence_ratio: ClassVar[bool] = True
    level: ClassVar[Level] = Level.sequence

    samples_per_prompt: int = 2
    loss_type: RLOOLoss = RLOOLoss.clip
    kl_coef: float = 0.05
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1

    @property
    def has_ratio(self) -> bool:  # type: ignore[override]
        """Whether the loss is that of the clipped ratio."""
        return self.loss_type is RLOOLoss.clip

    @property
    def unused(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys of the clipped loss for `loss_type=reinforce`, which has no ratio."""
        return (*_CLIP_RANGE, *_CLIPPED_LOSS) if self.loss_type is RLOOLoss.reinforce else ()


@option("algo", "grpo", part="rlhf.objectives.grpo:GRPO")
class GRPOConfig(PolicyGradientConfig):
    """GRPO: PPO's clipped ratio with advantages relative to the K samples of a prompt."""

    min_samples: ClassVar[int] = 2
    default_mean: ClassVar[Mean] = Mean.responses

    samples_per_prompt: int = 4
    kl_coef: float = 0.04
    advantage: Advantage = entry(Advantage.mean, added=True)
    scale: Scale = entry(Scale.group, when="advantage!=decoupled")
    mean: Mean | None = entry(None, added=True)
    """over what the loss is a mean; null: as in the paper of the algorithm"""
    ties: Ties = Ties.keep

    @property
    def mean_over(self) -> Mean:
        """Over what the loss is a mean."""
        return self.mean or self.default_mean

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the baseline or the scale compares the samples of a prompt, and there is one."""
        compares = (self.advantage, self.scale) != (Advantage.none, Scale.none)
        if self.min_samples <= self.samples_per_prompt < 2 and compares and "advantage" not in self.unused:
            rule = f"be >= 2 with {at}.advantage or {at}.scale"
            yield self.refused(at, "samples_per_prompt", rule, "they compare the samples of a prompt", 4)


@option("algo", "dr_grpo", part="rlhf.objectives.grpo:GRPO")
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO: GRPO with unscaled advantages and a constant divisor of the loss."""

    default_mean: ClassVar[Mean] = Mean.constant

    kl_coef: float = 0.0
    scale: Scale = Scale.none


@option("algo", "dapo", part="rlhf.objectives.grpo:GRPO")
class DAPOConfig(GRPOConfig):
    """DAPO: GRPO with a mean over all tokens and a larger upper bound of the ratio."""

    default_mean: ClassVar[Mean] = Mean.tokens

    clip_high: float = 0.28
    kl_coef: float = 0.0


@option("algo", "gspo", part="rlhf.objectives.grpo:GRPO")
class GSPOConfig(GRPOConfig):
    """GSPO: GRPO with one ratio per response, the geometric mean of the ratios of its tokens."""

    sequence_ratio: ClassVar[bool] = True
    level: ClassVar[Level] = Level.geometric

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0


@option("algo", "cispo", part="rlhf.objectives.cispo:CISPO")
class CISPOConfig(GRPOConfig):
    """CISPO: REINFORCE on every token, weighted by the ratio of the token, which has an upper bound."""

    default_mean: ClassVar[Mean] = Mean.tokens
    unused: ClassVar[tuple[str, ...]] = _CLIPPED_LOSS

    clip_low: float = 1.0
    clip_high: float = 4.0
    kl_coef: float = 0.0


# Sections of the algorithms that were designed for samples of an older policy (`algo=...`).


class M2POForm(Choice):
    """How the second moment of log-ratios is limited."""

    mask = "mask", "the tokens of largest ratio have no loss, as in the paper"
    clip = "clip", "all ratios are clipped at one bound, as in the code of the authors"


class DPPODivergence(Choice):
    """The divergence of a token's probability, this token against all others."""

    tv = "tv", "|p - q|"
    kl = "kl", "KL(q || p) of the two outcomes"


class OAPLAnchor(Choice):
    """The policy to which OAPL regresses."""

    behaviour = "behaviour", "the sampler: OAPL"
    reference = "reference", "the frozen reference: the loss of A*-PO"


class TeacherDivergence(Choice):
    """What is made small between policy and teacher at a token; k is logp - teacher of the sampled token."""

    exact = "exact", "the divergence over the vocabulary that beta selects"
    k1 = "k1", "k as a penalty of REINFORCE: KL(policy || teacher), on average"
    k2 = "k2", "k^2 / 2: the gradient of k1, on average"
    k3 = "k3", "exp(-k) - 1 + k: the gradient of KL(teacher || policy), on average"


@dataclass(kw_only=True, slots=True)
class UnclippedConfig(GRPOConfig):
    """The keys of the algorithms whose loss is a ratio to the sampler, limited in another way than PPO's."""

    default_mean: ClassVar[Mean] = Mean.tokens
    unused: ClassVar[tuple[str, ...]] = (*_CLIP_RANGE, *_CLIPPED_LOSS)

    kl_coef: float = 0.0
    anchor: Anchor = Anchor.behaviour


@option("algo", "m2po", part="rlhf.objectives.m2po:M2PO")
class M2POConfig(UnclippedConfig):
    """M2PO: a policy gradient whose ratios to the sampler have a bounded second moment."""

    unused: ClassVar[tuple[str, ...]] = (*UnclippedConfig.unused, "anchor")  # it is always the sampler

    form: M2POForm = M2POForm.mask
    least_low: float = number(0.0, when="form=clip", least=0, below=1, added=True)
    """ratios down to 1 - least_low are never clipped"""
    least_high: float = number(0.0, when="form=clip", least=0, added=True)
    """ratios up to 1 + least_high are never clipped"""
    limit: float = number(0.04, above=0)
    """bound of the mean of (log ratio)^2 over the tokens whose ratio rises with A"""


@option("algo", "topr", part="rlhf.objectives.topr:TOPR")
class TOPRConfig(UnclippedConfig):
    """TOPR: REINFORCE; only the weights of responses with a negative advantage are ratios, at most 1."""

    scale: Scale = Scale.none
    level: Level = entry(Level.sequence, "the unit of one ratio")
    sign_of_score: bool = entry(False, added=True)
    """avoid the responses with a score of at most 0, instead of those with A < 0"""


@option("algo", "dppo", part="rlhf.objectives.dppo:DPPO")
class DPPOConfig(UnclippedConfig):
    """DPPO: tokens whose probability moved too far from the sampler's are masked, instead of clipped."""

    divergence: DPPODivergence = DPPODivergence.tv
    limit_low: float | None = number(None, above=0, remedy="null")
    """A < 0: largest fall in probability; null: tv 0.15, kl 0.05"""
    limit_high: float | None = number(None, above=0, remedy="null")
    """A > 0: largest rise in probability; null: tv 0.15, kl 0.05"""
    cap: float = number(3.0, "the largest ratio that weighs a token", above=0)
    both_sides: bool = entry(False, added=True)
    """mask tokens whatever the sign of A (the default loss of prime-rl)"""

    @property
    def limits(self) -> tuple[float, float]:
        """The limits `limit_low` and `limit_high`; where they are null, the default of the divergence."""
        default = 0.15 if self.divergence is DPPODivergence.tv else 0.05  # of the authors, arXiv 2602.04879
        low, high = (default if limit is None else limit for limit in (self.limit_low, self.limit_high))
        return low, high


@option("algo", "scalerl", part="rlhf.objectives.scalerl:ScaleRL")
class ScaleRLConfig(UnclippedConfig):
    """ScaleRL: truncated ratios as weights, advantages scaled over the batch, a mean over prompts."""

    default_mean: ClassVar[Mean] = Mean.prompts

    scale: Scale = Scale.batch
    ties: Ties = Ties.drop
    cap: float = number(5.0, "the largest ratio that weighs a token", above=0)


@option("algo", "vespo", part="rlhf.objectives.vespo:VESPO")
class VESPOConfig(UnclippedConfig):
    """VESPO: REINFORCE; the ratio W of a response weighs it by W^k exp(lambda (1 - W))."""

    unused: ClassVar[tuple[str, ...]] = (*UnclippedConfig.unused, *_CORRECTION)
    level: ClassVar[Level] = Level.sequence

    power_good: float = number(2.0, "k where A >= 0", above=0)
    power_bad: float = number(3.0, "k where A < 0", above=0)
    decay_good: float = number(3.0, "lambda where A >= 0", above=0)
    decay_bad: float = number(2.0, "lambda where A < 0", above=0)


@option("algo", "sapo", part="rlhf.objectives.sapo:SAPO")
class SAPOConfig(UnclippedConfig):
    """SAPO: a sigmoid of the ratio of each token in place of a clip."""

    anchor: Anchor = Anchor.old
    tau_good: float = number(1.0, "steepness of the sigmoid where A > 0", above=0)
    tau_bad: float = number(1.05, "steepness of the sigmoid where A <= 0", above=0)


@option("algo", "gpg", part="rlhf.objectives.grpo:GRPO")
class GPGConfig(UnclippedConfig):
    """GPG: REINFORCE with the mean reward of the prompt as baseline; no ratio."""

    default_mean: ClassVar[Mean] = Mean.responses
    has_ratio: ClassVar[bool] = False

    anchor: Anchor = Anchor.old
    scale: Scale = Scale.none
    ties: Ties = Ties.drop


@option("algo", "reinforce_pp", part="rlhf.objectives.reinforce_pp:ReinforcePP")
class ReinforcePPConfig(GRPOConfig):
    """REINFORCE++: PPO's clipped ratio with rewards to go, whitened over the tokens of the batch."""

    default_mean: ClassVar[Mean] = Mean.tokens
    min_samples: ClassVar[int] = 1
    learns_from_ties: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("ties",)

    advantage: Advantage = Advantage.none
    scale: Scale = Scale.none
    kl_coef: float = 0.0
    kl_in: KLIn = KLIn.reward
    kl_estimator: KLEstimator = KLEstimator.k1
    gamma: float = number(1.0, "discount of later rewards", least=0, most=1)


@option("algo", "distill", part="rlhf.objectives.distill:Distill")
class DistillConfig(GRPOConfig):
    """On-policy distillation: the policy learns from a teacher, model.reference, on its own samples."""

    default_mean: ClassVar[Mean] = Mean.tokens
    distils: ClassVar[bool] = True
    min_samples: ClassVar[int] = 1
    learns_from_ties: ClassVar[bool] = True

    samples_per_prompt: int = 1
    kl_coef: float = 0.0
    scale: Scale = Scale.none
    divergence: TeacherDivergence = TeacherDivergence.exact
    beta: float = number(1.0, when="divergence=exact", least=0, most=1)
    """1: KL(policy || teacher); 0: KL(teacher || policy); between: a Jensen-Shannon divergence"""
    top: int | None = number(None, when="divergence=exact", least=1, remedy="64")
    """compare only the teacher's most probable tokens, and all others together; null: all tokens"""
    gamma: float = number(0.0, "discount of k of later tokens", "divergence=k1", least=0, most=1)
    cap: float = number(5.0, when="divergence!=exact or reward_coef!=0", least=0)
    """largest ratio to the sampler that weighs a token; 0: no weights"""
    teacher_coef: float = number(1.0, "weight of the divergence", above=0)
    reward_coef: float = number(0.0, "weight of the advantages of the rewards", least=0)
    teacher: ServedTeacherConfig = field(default_factory=ServedTeacherConfig)

    @property
    def unused(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys that the loss does not use; without rewards, also those of advantages."""
        others = "anchor", "ties", "kl_coef", "off_policy_mask", "entropy_coef", "square_coef"
        rewards = () if self.reward_coef else ("advantage", "scale", "normalize_scores", "clip_scores")
        return *UnclippedConfig.unused, *_CORRECTION, *others, *rewards

    @property
    def teacher_url(self) -> str | None:  # type: ignore[override]
        """The address of the server that runs the teacher."""
        return self.teacher.url


@option("algo", "oapl", part="rlhf.objectives.oapl:OAPL")
class OAPLConfig(AlgoConfig):
    """OAPL: regression of log-ratios on optimal advantages; no ratio weights and no clipping."""

    min_samples: ClassVar[int] = 2
    learns_from_ties: ClassVar[bool] = True

    samples_per_prompt: int = 4
    anchor: OAPLAnchor = OAPLAnchor.behaviour
    beta_value: float = number(1.0, above=0)
    """temperature of the mean of exponentials that estimates the optimal value"""
    beta: float = number(1e-3, "factor of the log-ratio that is compared with the advantage", above=0)

    @property
    def needs_sampler(self) -> bool:  # type: ignore[override]
        """Whether the regression is anchored at the sampler."""
        return self.anchor is OAPLAnchor.behaviour
