"""Sizes derived from a config, for the summary at the start of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config.algo import Trains
from rlhf.config.cores import threads
from rlhf.config.schema import plain
from rlhf.core.launched import world_size
from rlhf.core.state import TrainState
from rlhf.memory import plan
from rlhf.memory.plan import fills_memory

if TYPE_CHECKING:
    from rlhf.config.root import Config

_MANY_PASSES = 10


def describe(cfg: Config, examples: int | None = None) -> list[tuple[str, str]]:
    """Return (name, value) rows of the summary: derived sizes of a run, and the memory that the run needs.

    Args:
        cfg: the config of the run.
        examples: the size of the training data; None: not known yet.
    """
    return [*counts(cfg, examples), *_scores(cfg), *plan.rows(cfg)]


def counts(cfg: Config, examples: int | None = None) -> list[tuple[str, str]]:
    """Return (name, value) rows of the counts of a run, from episodes per update to checkpoints.

    Args:
        cfg: the config of the run.
        examples: the size of the training data; None: not known yet.
    """
    schedule, per_update = cfg.schedule, cfg.episodes_per_update
    prompts, group = schedule.prompts_per_update, cfg.algo.samples_per_prompt
    rows = [("episodes per update", f"{per_update:,} = {prompts:,} prompts x {group} samples")]
    if examples is None and not cfg.reads_pairs:
        examples = cfg.task.train_size
    in_minibatch = prompts // schedule.minibatches * group
    ranks = world_size()
    share = math.ceil(in_minibatch / group / ranks) * group
    forwards = math.ceil(share / cfg.backend.micro_batch)
    forward = f"{min(cfg.backend.micro_batch, share)}, {forwards} per optimizer step"
    if ranks > 1:
        forward += f" on each of {ranks} ranks"
    filled = fills_memory(cfg)
    if filled or cfg.backend.tokens is not None:
        limit = "what fits into the memory" if filled else f"{cfg.backend.tokens:,} tokens"
        forward = f"at most {min(cfg.backend.micro_batch, share)}, and at most {limit}"
    if cfg.epochs is not None and examples is None:
        rows.append(("updates", f"{plain(cfg.epochs)} epochs; the number is known when the data are read"))
        rows.append(("sequences per forward", forward))
        return rows
    updates = cfg.num_updates(examples)
    unit = "examples" if cfg.algo.supervised else "prompts"
    if cfg.epochs is None:
        rows.append(("updates", f"{updates:,} = {schedule.total_episodes:,} episodes / {per_update:,}"))
        if examples is not None:
            rows.append(("passes over the data", f"{passes(cfg, examples):.3g} of {examples:,} {unit}"))
    else:
        epochs = plain(cfg.epochs)
        rows.append(("updates", f"{updates:,} = {epochs} epochs of {examples:,} {unit} / {prompts:,}"))
    steps = updates * schedule.minibatches * schedule.epochs
    parts = f"{updates:,} updates x {schedule.minibatches} minibatches x {schedule.epochs} epochs"
    evaluated = _due_updates(schedule.eval_every, updates, at_end=True)
    return [
        *rows,
        ("optimizer steps", f"{steps:,} = {parts}"),
        ("sequences per forward", forward),
        *([("generator", cfg.generator.name)] if cfg.generator.packages else []),
        *_cores(cfg),
        ("evaluations", _at_updates([0, *evaluated] if evaluated else [])),
        ("checkpoints", _at_updates([u for u in _due_updates(schedule.save_every, updates) if u < updates])),
    ]


def passes(cfg: Config, examples: int) -> float:
    """Return how often a run draws each of the `examples` prompts of the training data."""
    return cfg.num_updates(examples) * cfg.schedule.prompts_per_update / examples


def doubts(cfg: Config, examples: int) -> Iterator[str]:
    """Yield a warning if the run passes over its training data many times, or too few for `solved_at`.

    Args:
        cfg: the config of the run.
        examples: the size of the training data.
    """
    if (often := passes(cfg, examples)) > _MANY_PASSES:
        fewer = max(1, round(3 * examples / cfg.schedule.prompts_per_update)) * cfg.episodes_per_update
        remedy = f"schedule.total_episodes={fewer}" if cfg.epochs is None else "schedule.total_epochs=3"
        yield (
            f"the run passes {often:.3g} times over its {examples:,} training rows (after about "
            f"{_MANY_PASSES} passes a model mostly memorises its data); for 3 passes set {remedy}"
        )
    if cfg.schedule.solved_at is not None and often <= 1:
        yield (
            f"schedule.solved_at={plain(cfg.schedule.solved_at)} has no effect in {often:.3g} passes over "
            "the data (solved prompts are left out of later passes)"
        )


def _scores(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) rows that explain the scores in the terminal: reward and judge."""
    if cfg.algo.trains is Trains.policy and cfg.generator.rollouts:
        yield "reward", f"score of {cfg.scorer.described}, which training maximizes"
    if cfg.algo.trains is not Trains.reward and cfg.gold.name != "none":
        yield "judge", f"score of {cfg.gold.described}, used only by evaluations"


def _cores(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) row of the CPU threads, if trainer and generator run in parallel."""
    trainer, generator = threads(cfg)
    if generator is not None and cfg.schedule.max_lag > 0:
        n = cfg.generator.replicas
        which = "generator process" if n == 1 else f"each of {n} generator processes"
        yield "CPU threads", f"trainer {trainer}, {which} {generator}"


def _due_updates(every: float, updates: int, at_end: bool = False) -> list[int]:
    """Return the updates after which an event with interval `every` is due.

    Args:
        every: number of updates between two events; below 1: a fraction of the run; 0: never.
        updates: number of updates of the run.
        at_end: whether the event is also due after the last update.
    """
    states = (TrainState(num_updates=updates, update=update) for update in range(1, updates + 1))
    return [state.update for state in states if state.due(every, at_end)]


def _at_updates(updates: list[int]) -> str:
    """Format a list of updates as text; of more than 8 updates, the first 4 and the last are listed."""
    if not updates:
        return "none"
    shown = [f"{update:,}" for update in updates]
    if len(shown) > 8:
        shown = [*shown[:4], "...", shown[-1]]
    return f"{len(updates)}, after updates {' '.join(shown)}"
