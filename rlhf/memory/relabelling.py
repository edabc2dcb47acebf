"""The memory plan of `rlhf.relabel`, which loads only the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.model import Dtype
from rlhf.memory.advice import nearly_full, refusal, smaller
from rlhf.memory.loaded_models import judges
from rlhf.memory.plan import plan_of_judges

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.machine import Machine
    from rlhf.memory.uses import Plan, Use

PAIRS = 256  # pairs that are passed to the judge at once, and between two steps of the progress bar


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of relabelling with the config `cfg` on `machine`, by default this machine.

    The plan is empty if no judge is a model. If the size of a judge is unknown, the plan lists only unknown
    models.
    """
    return plan_of_judges(cfg.with_({"schedule.prompts_per_update": PAIRS}), machine)


def problems(cfg: Config) -> list[str]:
    """Return an error for each device that certainly has too little memory to relabel with `cfg`."""
    return [_too_little(cfg, use) for use in plan(cfg).uses if not use.fits]


def warnings(cfg: Config) -> list[str]:
    """Return a warning for each device that may have too little memory to relabel with `cfg`."""
    return [f"relabelling {text}" for text in nearly_full(plan(cfg))]


def _too_little(cfg: Config, use: Use) -> str:
    judge, step = next(judges(cfg)), 2  # the two responses of a pair
    size = smaller(cfg, "gold", "batch_size", step, _fits)
    if size is not None:
        remedy = f"set gold.batch_size={size}"
        return refusal(use, "relabelling", "gold.batch_size", cfg.gold.sequences, remedy)
    remedy = f"set {judge.key} to a smaller model"
    if cfg.model.dtype is Dtype.float32:
        remedy += ", or set model.dtype=bfloat16"
    return refusal(use, "relabelling", judge.key, judge.name, remedy)


def _fits(cfg: Config) -> bool:
    return all(use.fits for use in plan(cfg).uses)
