"""Rules for the order of rollouts and for the clock."""

from __future__ import annotations

from rlhf.checks.rules import (
    DOUBTS,
    TRAINING_RULES,
    Allowed,
    When,
    chosen,
    doubtful,
    is_set,
    must,
    one_of,
)
from rlhf.config.schedule import Dropped, Order, Stale, Unit
from rlhf.core.launched import world_size

_VIRTUAL = When("with clock=virtual", lambda cfg: cfg.clock.virtual)
_BATCHES = When(
    "with clock=wall and generator={generator}",
    lambda cfg: not cfg.clock.virtual and not cfg.generator.samples_singly,
)
_COMPLETED = When(
    "with schedule.order=completed and clock=wall",
    lambda cfg: cfg.schedule.order is Order.completed and not cfg.clock.virtual,
)
_COMPLETED_ON_RANKS = When(
    "with schedule.order=completed and several ranks",
    lambda cfg: world_size() > 1 and cfg.schedule.order is Order.completed,
)
_FIFO = When("with schedule.order=fifo", lambda cfg: cfg.schedule.order is Order.fifo)
_SEVERAL_RANKS = When("with several ranks", lambda cfg: world_size() > 1)
_ON_EACH_RANK = When(
    "with several ranks that all sample",
    lambda cfg: world_size() > 1 and cfg.generator.on_each_rank(cfg.schedule.max_lag),
)
_NO_SAMPLES = When("with generator={generator}", lambda cfg: not cfg.generator.samples)
_ONE_SAMPLE = When("with algo.samples_per_prompt=1", lambda cfg: cfg.algo.samples_per_prompt == 1)
_TOO_FEW_SLOTS = When(
    "with schedule.unit=group",
    lambda cfg: (
        cfg.schedule.unit is Unit.group and int(chosen(cfg, "clock.slots") or 0) < cfg.algo.samples_per_prompt
    ),
)
_USES_TIES = When("with algo={algo}", lambda cfg: cfg.algo.learns_from_ties)

TRAINING_RULES += [
    must("clock", "wall", _NO_SAMPLES, "nothing is sampled"),
    must("clock", "wall", _SEVERAL_RANKS, "one process simulates all generators"),
    must(
        "generator",
        Allowed("be hf", lambda generator: generator.samples_parts or not generator.samples),
        _VIRTUAL,
        "responses are sampled in parts, with the trained model itself",
        fix="generator=hf",
    ),
    must(
        "generator.worker",
        one_of(None, False),
        _VIRTUAL,
        "the generators are simulated in the trainer's process",
        fix="generator.worker=null",
    ),
    must(
        "schedule.order",
        "fifo",
        _BATCHES,
        "its processes take whole batches, in the order of the requests",
        fix="schedule.order=fifo, clock=virtual or generator=vllm_server",
    ),
    must("schedule.order", "fifo", _COMPLETED_ON_RANKS, "one process chooses the groups"),
    must("schedule.update", "in_flight", _COMPLETED, "all responses of a server have the same weights"),
    must("schedule.refill", 0, _COMPLETED, "groups are scored after they were chosen"),
    must("schedule.max_age", None, _FIFO, "ages are at most schedule.max_lag"),
    must(
        "clock.slots",
        Allowed("be >= algo.samples_per_prompt", lambda slots: slots is None),
        _TOO_FEW_SLOTS,
        "the samples of a prompt start together",
        fix="clock.slots={algo.samples_per_prompt} or schedule.unit=sequence",
    ),
    must("schedule.refill", 0, _NO_SAMPLES, "nothing is sampled"),
    must("schedule.refill", 0, _ONE_SAMPLE, "the score of one response has nothing to tie with"),
    must("schedule.refill", 0, _USES_TIES, "prompts whose scores tie have signal, too"),
    must("schedule.refill", 0, _ON_EACH_RANK, "a few prompts cannot be divided among the ranks"),
]

DOUBTS += [
    doubtful(
        "schedule.stale={schedule.stale} has no effect without schedule.max_age",
        lambda cfg: cfg.schedule.stale is not Stale.wait and cfg.schedule.max_age is None,
    ),
    doubtful(
        "schedule.unit={schedule.unit} has no effect with schedule.order=fifo and clock=wall",
        lambda cfg: (
            cfg.schedule.unit is not Unit.group and not cfg.clock.virtual and cfg.schedule.order is Order.fifo
        ),
    ),
    doubtful(
        "schedule.dropped={schedule.dropped} has no effect without schedule.stale=drop",
        lambda cfg: cfg.schedule.dropped is not Dropped.again and cfg.schedule.stale is not Stale.drop,
    ),
    doubtful(
        "clock.train_token_s={clock.train_token_s} has no effect without clock.train_s",
        lambda cfg: chosen(cfg, "clock.train_token_s") not in ("", "0") and not is_set(cfg, "clock.train_s"),
    ),
    doubtful(
        "schedule.stale=cut ends responses before their end token, and scorer.missing_eos_score or "
        "scorer.missing_eos_penalty punishes them; set both to null, or schedule.stale=wait",
        lambda cfg: (
            cfg.schedule.stale is Stale.cut
            and cfg.schedule.max_age is not None
            and (is_set(cfg, "scorer.missing_eos_score") or is_set(cfg, "scorer.missing_eos_penalty"))
        ),
    ),
    doubtful(
        "schedule.refill={schedule.refill} hardly replaces a group: scores of a reward model rarely tie",
        lambda cfg: cfg.schedule.refill > 0 and chosen(cfg, "scorer") == "reward_model",
    ),
    doubtful(
        "schedule.update=in_flight makes a run depend on timing (which weights sample a token): two runs "
        "with the same config will differ, and so will a resumed run",
        lambda cfg: cfg.schedule.in_flight and not cfg.clock.virtual,
    ),
]
