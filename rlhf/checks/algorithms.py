"""Rules between the algorithm and the generator, the scorer and the schedule."""

from __future__ import annotations

from rlhf.checks.rules import DOUBTS, RULES, TRAINING_RULES, Allowed, When, doubtful, must, one_of, other_than
from rlhf.config.algo import Trains

SUPERVISED = When("for algo={algo}", lambda cfg: cfg.algo.supervised)
_NEW_SAMPLES = When(
    "with generator={generator}", lambda cfg: cfg.generator.samples and not cfg.algo.supervised
)
_STORED = When("with generator={generator}", lambda cfg: not cfg.generator.rollouts)
_OF_DATA = "for algo={algo} generator={generator}"
_STORED_PAIRS = When(_OF_DATA, lambda cfg: not cfg.generator.rollouts and cfg.reads_pairs)
_STORED_TEXTS = When(_OF_DATA, lambda cfg: not cfg.generator.rollouts and not cfg.reads_pairs)

TRAINING_RULES += [
    must("generator", "dataset", SUPERVISED, "it trains on stored responses"),
    must("scorer", "labels", SUPERVISED, "it maximises no score"),
    must(
        "scorer", other_than("labels"), _NEW_SAMPLES, "new samples have no labels", fix="scorer=reward_model"
    ),
    must("algo.samples_per_prompt", 2, _STORED_PAIRS, "an example has a chosen and a rejected response"),
    must("algo.samples_per_prompt", 1, _STORED_TEXTS, "an example has one reference response"),
    must("schedule.max_lag", 0, _STORED, "nothing is sampled, so there is no lag"),
    must(
        "algo.weighting",
        one_of("none", "wpo"),
        _STORED,
        "stored pairs have no log-probs of their sampler",
        fix="algo.weighting=wpo",
    ),
]

RULES += [
    must(
        "generator",
        Allowed("be one that samples", lambda generator: generator.rollouts),
        When("for algo={algo}", lambda cfg: cfg.algo.needs_sampler),
        "ratios are taken to the sampler's log-probs",
        fix="generator=hf",
    )
]

DOUBTS += [
    doubtful(
        "schedule.epochs={schedule.epochs} repeats each batch before the next batch; set "
        "schedule.total_epochs for passes over the data",
        lambda cfg: cfg.algo.supervised and cfg.schedule.epochs > 1,
    ),
    doubtful(
        "model.reference has no effect with algo={algo} (it has no reference model)",
        lambda cfg: cfg.algo.trains is not Trains.policy and cfg.model.reference is not None,
    ),
]
