"""Rules for the length of a run, for equal parts of batches, for replay, and for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import (
    DOUBTS,
    TRAINING_RULES,
    Allowed,
    When,
    chosen,
    doubt,
    doubtful,
    must,
    training_rule,
)
from rlhf.config.metric_names import KNOWN, lacking
from rlhf.config.packages import missing_package
from rlhf.config.root import Config
from rlhf.config.schedule import MOST_EPISODES, ESSScaling, Optimizer
from rlhf.config.schema import plain
from rlhf.config.suggestions import closest
from rlhf.core.launched import world_size

_NO_SAMPLES = When("with generator={generator}", lambda cfg: not cfg.generator.samples)

_LOG_PROBS = "the effective sample size is computed from the sampler's log-probs"

TRAINING_RULES += [
    must(
        "schedule.total_epochs",
        None,
        When("with generator.path", lambda cfg: cfg.generator.saved_rollouts is not None),
        "saved rollouts count as episodes",
        fix="schedule.total_epochs=null schedule.total_episodes=12800",
    ),
    must(
        "schedule.eval_every",
        Allowed("be > 0", lambda value: value != 0),
        When(
            "with objective_metric={objective_metric}",
            lambda cfg: (cfg.objective_metric or "").startswith("eval/"),
        ),
        "only an evaluation measures that metric",
        fix="schedule.eval_every=0.2",
    ),
    must("schedule.replay", 1, _NO_SAMPLES, "nothing is sampled, and epochs repeat stored responses"),
    must("schedule.solved_at", None, _NO_SAMPLES, "its scores are those of stored responses"),
    must(
        "optim.optimizer",
        "adamw",
        When("with backend={backend}", lambda cfg: not cfg.backend.any_optimizer),
        "its engine has no other optimizer",
        fix="optim.optimizer=adamw or backend=torch",
    ),
    must("optim.ess_scaling", "none", When("with algo={algo}", lambda cfg: cfg.algo.supervised), _LOG_PROBS),
    must(
        "optim.ess_scaling",
        "none",
        When(
            "with generator={generator} without a path",
            lambda cfg: not cfg.generator.rollouts and not cfg.algo.supervised,
        ),
        _LOG_PROBS,
    ),
]

DOUBTS += [
    doubtful(
        "schedule.solved_at={schedule.solved_at} is compared with scores of a reward model, which are not "
        "pass rates",
        lambda cfg: cfg.schedule.solved_at is not None and chosen(cfg, "scorer") == "reward_model",
    ),
    doubtful(
        "optim.ess_on_policy={optim.ess_on_policy} has no effect with optim.ess_scaling=none; set "
        "optim.ess_scaling=sqrt",
        lambda cfg: cfg.optim.ess_scaling is ESSScaling.none and cfg.optim.ess_on_policy != 1,
    ),
]


@training_rule
def _objective_metric(cfg: Config) -> Iterator[str]:
    name = cfg.objective_metric
    if name is not None and (found := lacking(name, cfg)):
        guess = closest(name, KNOWN) or name
        fix = "null" if lacking(guess, cfg) else guess
        yield f"objective_metric must {found[0]}, got {name}; set objective_metric={fix}"


@training_rule
def _length(cfg: Config) -> Iterator[str]:
    episodes, epochs = cfg.schedule.total_episodes, cfg.schedule.total_epochs
    if cfg.epochs is None and episodes is None:
        yield (
            "schedule.total_episodes or schedule.total_epochs must be set (it is the length of the run), got "
            "null; set schedule.total_episodes=12800"
        )
    elif episodes is not None and epochs is not None:
        yield (
            "schedule.total_episodes and schedule.total_epochs must not both be set (each is the length of "
            f"the run), got {episodes} and {plain(epochs)}; set schedule.total_epochs=null or "
            "schedule.total_episodes=null"
        )
    per_update = cfg.episodes_per_update
    if episodes is None or not 1 <= episodes <= MOST_EPISODES or per_update < 1:
        return
    if episodes % per_update:
        yield (
            "schedule.total_episodes must be divisible by the episodes of an update "
            f"(schedule.prompts_per_update x algo.samples_per_prompt = {cfg.schedule.prompts_per_update} x "
            f"{cfg.algo.samples_per_prompt} = {per_update}), got {episodes}; "
            f"set schedule.total_episodes={_nearest_multiple(episodes, per_update)}"
        )


@training_rule
def _division(cfg: Config) -> Iterator[str]:
    prompts, parts = cfg.schedule.prompts_per_update, cfg.schedule.minibatches
    yield from _divisible(
        "schedule.prompts_per_update",
        prompts,
        "schedule.minibatches (minibatches are equal parts of the prompts)",
        parts,
    )
    yield from _divisible(
        "backend.micro_batch",
        cfg.backend.micro_batch,
        "algo.samples_per_prompt (the samples of one prompt are never split)",
        cfg.algo.samples_per_prompt,
    )
    ranks = world_size()
    for key, count, meaning in (
        (
            "schedule.prompts_per_update",
            prompts // max(parts, 1),
            "each minibatch is divided among the ranks",
        ),
        ("eval.prompts", cfg.eval.prompts, "the held-out prompts are divided among the ranks"),
    ):
        if 1 <= count < ranks:
            yield (
                f"{key} must give each of the {ranks} ranks a prompt ({meaning}), got {count}; start fewer "
                f"ranks, or set {key}={ranks * (parts if key.startswith('schedule') else 1)}"
            )


@training_rule
def _bitsandbytes_is_installed(cfg: Config) -> Iterator[str]:
    eight_bits = cfg.optim.optimizer is Optimizer.adamw_8bit and cfg.backend.any_optimizer
    if eight_bits:
        option, otherwise = "optim.optimizer=adamw_8bit", "set optim.optimizer=adamw"
        yield from missing_package(option, "bitsandbytes", "bnb", otherwise=otherwise)


@doubt
def _never_reached(cfg: Config) -> Iterator[str]:
    schedule = cfg.schedule
    if schedule.total_episodes is None or cfg.episodes_per_update < 1:
        return
    updates = cfg.num_updates()
    steps = updates * schedule.minibatches * schedule.epochs
    if schedule.max_lag >= updates > 0:
        yield f"schedule.max_lag={schedule.max_lag} is never reached in a run of {updates} updates"
    if schedule.replay > updates > 0:
        yield f"schedule.replay={schedule.replay} batches are never reached in a run of {updates} updates"
    if cfg.optim.warmup >= max(1, steps):
        yield (
            f"optim.warmup={plain(cfg.optim.warmup)} lasts the whole run of {steps} optimizer steps, so "
            "the learning rate never reaches optim.lr"
        )


def _divisible(key: str, whole: int, by: str, part: int) -> Iterator[str]:
    if whole >= 1 and part >= 1 and whole % part:
        yield (
            f"{key} must be divisible by {by}, got {whole} and {part}; "
            f"set {key}={_nearest_multiple(whole, part)}"
        )


def _nearest_multiple(value: int, of: int) -> int:
    """Return the multiple of `of` that is closest to `value`, at least `of` itself."""
    return max(1, round(value / of)) * of
