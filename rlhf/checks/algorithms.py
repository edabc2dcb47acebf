"""Rules between the algorithm and the generator, the scorer and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import doubt, rule, training_rule
from rlhf.config.algo import DPOConfig, PairWeighting, Trains
from rlhf.config.off_policy import OAPLAnchor, OAPLConfig
from rlhf.config.policy_gradient import PolicyGradientConfig
from rlhf.config.root import Config
from rlhf.config.schema import plain


@training_rule
def stored_completions(cfg: Config) -> Iterator[str]:
    """Yield an error if the generator, the scorer or the lag does not fit the algorithm."""
    algo, generator = cfg.algo, cfg.generator
    if generator.samples:
        if algo.supervised:
            yield (
                f"generator must be dataset for algo={algo.name} (it trains on stored responses), "
                f"got {generator.name}; set generator=dataset"
            )
        elif cfg.scorer.name == "labels":
            yield (
                f"scorer must not be labels with generator={generator.name} (new samples have no labels), "
                "got labels; set scorer=reward_model"
            )
        return
    if algo.supervised and cfg.scorer.name != "labels":
        yield (
            f"scorer must be labels for algo={algo.name} (it maximises no score), got {cfg.scorer.name}; "
            "set scorer=labels"
        )
    if generator.rollouts:
        return
    wanted = 2 if cfg.reads_pairs else 1
    if algo.samples_per_prompt != wanted:
        what = "a chosen and a rejected response" if wanted == 2 else "one reference response"
        yield (
            f"algo.samples_per_prompt must be {wanted} for algo={algo.name} generator=dataset (an example "
            f"has {what}), got {algo.samples_per_prompt}; set algo.samples_per_prompt={wanted}"
        )
    if cfg.schedule.max_lag > 0:
        yield (
            "schedule.max_lag must be 0 with generator=dataset (nothing is sampled, so there is no lag), "
            f"got {cfg.schedule.max_lag}; set schedule.max_lag=0"
        )


@rule
def ratios_need_a_sampler(cfg: Config) -> Iterator[str]:
    """Yield an error if an algorithm with ratios would train without the sampler's log-probs."""
    algo = cfg.algo
    regression = isinstance(algo, OAPLConfig) and algo.anchor is OAPLAnchor.behaviour
    if (regression or isinstance(algo, PolicyGradientConfig)) and not cfg.generator.rollouts:
        yield (
            f"generator must be one that samples for algo={algo.name} (ratios are taken to the sampler's "
            f"log-probs), got {cfg.generator.name}; set generator=hf"
        )


@training_rule
def pair_weights_need_a_sampler(cfg: Config) -> Iterator[str]:
    """Yield an error if pairs without the sampler's log-probs would get importance weights."""
    algo = cfg.algo
    if isinstance(algo, DPOConfig) and algo.weighting is PairWeighting["is"] and not cfg.generator.rollouts:
        yield (
            f"algo.weighting must be none or wpo with generator={cfg.generator.name} (stored pairs have no "
            "log-probs of their sampler), got is; set algo.weighting=wpo"
        )


@doubt
def no_effect(cfg: Config) -> Iterator[str]:
    """Yield a warning if `epochs`, `model.reference`, `max_lag` or `warmup` has no useful effect."""
    algo, schedule = cfg.algo, cfg.schedule
    if algo.supervised and schedule.epochs > 1:
        yield (
            f"schedule.epochs={schedule.epochs} repeats each batch before the next batch; set "
            "schedule.total_epochs for passes over the data"
        )
    if algo.trains is not Trains.policy and cfg.model.reference is not None:
        yield f"model.reference has no effect with algo={algo.name} (it has no reference model)"
    if schedule.total_episodes is not None and cfg.episodes_per_update >= 1:
        updates = cfg.num_updates()
        steps = updates * schedule.minibatches * schedule.epochs
        if schedule.max_lag >= updates > 0:
            yield f"schedule.max_lag={schedule.max_lag} is never reached in a run of {updates} updates"
        if cfg.optim.warmup >= max(1, steps):
            yield (
                f"optim.warmup={plain(cfg.optim.warmup)} lasts the whole run of {steps} optimizer steps, so "
                "the learning rate never reaches optim.lr"
            )
