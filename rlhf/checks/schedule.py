"""Rules for the length of a run, for equal parts of batches, for in-flight updates and for replay."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.checks.rules import doubt, rule, training_rule
from rlhf.config.root import Config
from rlhf.config.schedule import MOST_EPISODES
from rlhf.config.schema import plain
from rlhf.config.scorer import RewardModelScorerConfig
from rlhf.core.launched import world_size


@training_rule
def length(cfg: Config) -> Iterator[str]:
    """Yield an error if the length of the run is missing, ambiguous, in a wrong unit or not divisible."""
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
    elif epochs is not None and cfg.generator.rollouts and not cfg.generator.samples:
        yield (
            "schedule.total_epochs must be null with generator.path (saved rollouts count as episodes), "
            f"got {plain(epochs)}; set schedule.total_epochs=null schedule.total_episodes=12800"
        )
    per_update = cfg.episodes_per_update
    if episodes is None or not 1 <= episodes <= MOST_EPISODES or per_update < 1:
        return
    if episodes % per_update:
        yield (
            "schedule.total_episodes must be divisible by the episodes of an update "
            f"(schedule.prompts_per_update x algo.samples_per_prompt = {cfg.schedule.prompts_per_update} x "
            f"{cfg.algo.samples_per_prompt} = {per_update}), got {episodes}; "
            f"set schedule.total_episodes={nearest_multiple(episodes, per_update)}"
        )


@training_rule
def division(cfg: Config) -> Iterator[str]:
    """Yield an error if minibatches, ranks or micro-batches cannot get whole prompts, or equal parts."""
    prompts, parts = cfg.schedule.prompts_per_update, cfg.schedule.minibatches
    if prompts >= 1 and parts >= 1 and prompts % parts:
        yield (
            "schedule.prompts_per_update must be divisible by schedule.minibatches (minibatches are equal "
            f"parts of the prompts), got {prompts} and {parts}; "
            f"set schedule.prompts_per_update={nearest_multiple(prompts, parts)}"
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
    sequences, group = cfg.backend.micro_batch, cfg.algo.samples_per_prompt
    if sequences >= 1 and group >= 1 and sequences % group:
        yield (
            "backend.micro_batch must be divisible by algo.samples_per_prompt (the samples of one prompt are "
            f"never split), got {sequences} and {group}; "
            f"set backend.micro_batch={nearest_multiple(sequences, group)}"
        )


@training_rule
def objective_metric(cfg: Config) -> Iterator[str]:
    """Yield an error if `objective_metric` is a metric of evaluations and the run has no evaluations."""
    metric = cfg.objective_metric
    if metric is not None and metric.startswith("eval/") and cfg.schedule.eval_every == 0:
        yield (
            f"schedule.eval_every must be > 0 with objective_metric={metric} (only an evaluation measures "
            "that metric), got 0; set schedule.eval_every=0.2"
        )


@rule
def in_flight_needs_a_process(cfg: Config) -> Iterator[str]:
    """Yield an error if weights are updated in flight without a separate generator process."""
    schedule = cfg.schedule
    if schedule.in_flight and schedule.max_lag >= 1 and not cfg.has_worker:
        yield (
            "schedule.update must be between without a generator in a process of its own (no other generator "
            f"can load weights while it samples), got in_flight with generator={cfg.generator.name}; "
            "set schedule.update=between"
        )


@training_rule
def replay_needs_samples(cfg: Config) -> Iterator[str]:
    """Yield an error if batches of a generator that samples nothing would be replayed."""
    if cfg.schedule.replay > 1 and not cfg.generator.samples:
        yield (
            f"schedule.replay must be 1 with generator={cfg.generator.name} (nothing is sampled, and epochs "
            f"repeat stored responses), got {cfg.schedule.replay}; set schedule.replay=1"
        )


@training_rule
def solved_prompts_need_samples(cfg: Config) -> Iterator[str]:
    """Yield an error if prompts would be left out that a generator without samples does not score."""
    if cfg.schedule.solved_at is not None and not cfg.generator.samples:
        yield (
            f"schedule.solved_at must be null with generator={cfg.generator.name} (its scores are those of "
            f"stored responses), got {plain(cfg.schedule.solved_at)}; set schedule.solved_at=null"
        )


@doubt
def solved_by_a_reward_model(cfg: Config) -> Iterator[str]:
    """Yield a warning if the scores that decide whether a prompt is solved are not pass rates."""
    if cfg.schedule.solved_at is not None and isinstance(cfg.scorer, RewardModelScorerConfig):
        yield (
            f"schedule.solved_at={plain(cfg.schedule.solved_at)} is compared with scores of a reward model, "
            "which are not pass rates"
        )


@doubt
def replay_is_never_full(cfg: Config) -> Iterator[str]:
    """Yield a warning if the replay buffer has more batches than the run."""
    replay = cfg.schedule.replay
    if cfg.schedule.total_episodes is not None and cfg.episodes_per_update >= 1:
        updates = cfg.num_updates()
        if replay > updates > 0:
            yield f"schedule.replay={replay} batches are never reached in a run of {updates} updates"


def nearest_multiple(value: int, of: int) -> int:
    """Return the multiple of `of` that is closest to `value`, at least `of` itself."""
    return max(1, round(value / of)) * of
