"""Rules for numbers that several sections have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.checks.words import plain, read

if TYPE_CHECKING:
    from rlhf.config.root import Config


@dataclass(frozen=True, slots=True)
class Bound:
    """A number's lower bound; `above`: it must be more. None passes: the type says where it is allowed."""

    key: str
    least: float
    meaning: str
    remedy: float
    above: bool = False


BOUNDS = (
    Bound("schedule.total_episodes", 1, "responses of the whole run", 12800),
    Bound("schedule.total_epochs", 0, "passes over the data", 1, above=True),
    Bound("schedule.prompts_per_update", 1, "prompts of one update", 64),
    Bound("schedule.minibatches", 1, "optimizer steps in a pass over a batch", 1),
    Bound("schedule.epochs", 1, "passes over a batch", 1),
    Bound("schedule.max_lag", 0, "later batches in flight", 0),
    Bound("schedule.eval_every", 0, "updates, or a fraction of the run; 0 is never", 0.2),
    Bound("schedule.save_every", 0, "updates, or a fraction of the run; 0 is never", 0.25),
    Bound("schedule.log_every", 0, "updates, or a fraction of the run; 0 is never", 1),
    Bound("optim.lr", 0, "the optimizer's step size", 3e-6, above=True),
    Bound("optim.eps", 0, "Adam divides by it", 1e-8, above=True),
    Bound("optim.max_grad_norm", 0, "gradients are scaled down to it; null: they are not", 1.0, above=True),
    Bound("optim.weight_decay", 0, "the pull of weights towards zero", 0),
    Bound("optim.warmup", 0, "optimizer steps, or a fraction of the run", 0),
    Bound("eval.prompts", 1, "held-out examples", 256),
    Bound("eval.batch_size", 1, "sequences decoded at once", 256),
    Bound("eval.samples", 0, "rows of a table", 3),
    Bound("eval.temperature", 0, "logits are divided by it", 0.01, above=True),
    Bound("save_total_limit", 1, "checkpoints kept; the newest is what a run goes on from", 2),
    Bound("seed", 0, "it seeds generators that take no negative number", 1),
)


COUNTS_OR_FRACTIONS = ("schedule.eval_every", "schedule.save_every", "schedule.log_every", "optim.warmup")


def numbers(cfg: Config) -> Iterator[str]:
    """Numbers out of bounds, and counts that are not whole."""
    for bound in BOUNDS:
        value = read(cfg, bound.key)
        if value is None:
            continue
        low = not (value > bound.least if bound.above else value >= bound.least)
        if low or not math.isfinite(value):
            sign = ">" if bound.above else ">="
            yield (
                f"{bound.key} must be {sign} {plain(bound.least)} ({bound.meaning}), got {plain(value)}; "
                f"set {bound.key}={plain(bound.remedy)}"
            )
    for key in COUNTS_OR_FRACTIONS:
        value = read(cfg, key)
        if value is not None and value > 1 and math.isfinite(value) and value != int(value):
            unit = "optimizer steps" if key == "optim.warmup" else "updates"
            yield (
                f"{key} must be whole from 1 on (it counts {unit}; below 1 it is a fraction of the run), "
                f"got {plain(value)}; set {key}={round(value)}"
            )
    betas = cfg.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield (
            "optim.betas must be two numbers from 0 to below 1 (decay rates of the gradient and its square), "
            f"got [{','.join(map(plain, betas))}]; set optim.betas=[0.9,0.999]"
        )
