"""Rules for the length of a run and for batches that divide into equal parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.checks.words import nearest_multiple, plain
from rlhf.core.launched import rank_count

if TYPE_CHECKING:
    from rlhf.config.root import Config


def length(cfg: Config) -> Iterator[str]:
    """How long the run is: said once, in a unit that its algorithm has."""
    episodes, epochs = cfg.schedule.total_episodes, cfg.schedule.total_epochs
    stored = not cfg.generator.rollouts
    if episodes is None and epochs is None:
        units = "schedule.total_episodes" + (" or schedule.total_epochs" if stored else "")
        why = "it says how long the run is"
        yield f"{units} must be set ({why}), got null; set schedule.total_episodes=12800"
    elif episodes is not None and epochs is not None:
        yield (
            "schedule.total_episodes and schedule.total_epochs must not both be set (each says how long the "
            f"run is), got {episodes} and {plain(epochs)}; set schedule.total_epochs=null or "
            "schedule.total_episodes=null"
        )
    elif epochs is not None and not stored:
        yield (
            f"schedule.total_epochs must be null for algo={cfg.algo.name} generator={cfg.generator.name} "
            f"(fresh samples are counted in episodes), got {plain(epochs)}; set schedule.total_epochs=null "
            "schedule.total_episodes=12800"
        )
    per_update = cfg.episodes_per_update
    if episodes is not None and episodes >= 1 and per_update >= 1 and episodes % per_update:
        yield (
            "schedule.total_episodes must be divisible by the episodes of an update "
            f"(schedule.prompts_per_update x algo.samples_per_prompt = {cfg.schedule.prompts_per_update} x "
            f"{cfg.algo.samples_per_prompt} = {per_update}), got {episodes}; "
            f"set schedule.total_episodes={nearest_multiple(episodes, per_update)}"
        )


def division(cfg: Config) -> Iterator[str]:
    """Batches that do not divide into equal parts without splitting a group."""
    prompts, parts = cfg.schedule.prompts_per_update, cfg.schedule.minibatches
    if prompts >= 1 and parts >= 1 and prompts % parts:
        yield (
            "schedule.prompts_per_update must be divisible by schedule.minibatches (minibatches are equal "
            f"parts of the prompts), got {prompts} and {parts}; "
            f"set schedule.prompts_per_update={nearest_multiple(prompts, parts)}"
        )
    ranks = rank_count()
    for key, count, meaning in (
        ("schedule.prompts_per_update", prompts // max(parts, 1), "each minibatch is divided among them"),
        ("eval.prompts", cfg.eval.prompts, "the held-out prompts are divided among them"),
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


def objective_metric(cfg: Config) -> Iterator[str]:
    """A sweeper's figure that no evaluation measures."""
    metric = cfg.objective_metric
    if metric is not None and metric.startswith("eval/") and cfg.schedule.eval_every == 0:
        yield (
            "schedule.eval_every must be > 0 with objective_metric (without evaluation nothing measures "
            f"{metric}), got 0; set schedule.eval_every=0.2"
        )
