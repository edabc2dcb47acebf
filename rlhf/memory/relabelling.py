"""The memory plan of `rlhf.relabel`, which loads only the judge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.model import Dtype
from rlhf.config.scorer import RewardModelScorerConfig
from rlhf.memory.advice import in_short, nearly_full
from rlhf.memory.loaded_models import judges
from rlhf.memory.plan import on_device, unknown
from rlhf.memory.uses import Plan, gib

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.machine import Machine
    from rlhf.memory.uses import Use

PAIRS = 256  # pairs that are passed to the judge at once, and between two steps of the progress bar


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of relabelling with the config `cfg` on `machine`, by default this machine.

    The plan is empty if no judge is a model. If the size of a judge is unknown, the plan lists only unknown
    models.
    """
    loaded = tuple(judges(cfg))
    if cfg.stand_ins or not loaded:
        return Plan((), {})
    if names := unknown(loaded):
        return Plan((), names)
    cfg = replace(cfg, schedule=replace(cfg.schedule, prompts_per_update=PAIRS))
    return Plan((on_device(cfg, loaded, machine),), {})


def problems(cfg: Config) -> list[str]:
    """Return an error for each device that certainly has too little memory to relabel with `cfg`."""
    return [too_little(cfg, use) for use in plan(cfg).uses if not use.fits]


def warnings(cfg: Config) -> list[str]:
    """Return a warning for each device that may have too little memory to relabel with `cfg`."""
    return [f"relabelling {text}" for text in nearly_full(plan(cfg))]


def too_little(cfg: Config, use: Use) -> str:
    """Return the error message for a device with too little memory: key, rule, reason, value, remedy."""
    assert use.total is not None
    judge = next(judges(cfg))
    key, got, remedy = judge.key, judge.name, f"set {judge.key} to a smaller model"
    if cfg.model.dtype is Dtype.float32:
        remedy += ", or set model.dtype=bfloat16"
    if isinstance(cfg.gold, RewardModelScorerConfig) and (size := fitting(cfg)) is not None:
        key, got, remedy = "gold.batch_size", str(cfg.gold.batch_size), f"set gold.batch_size={size}"
    return (
        f"{key} must be small enough for the {gib(use.total)} of {use.device} (relabelling is estimated to "
        f"need {gib(use.bytes)}: {in_short(use)}), got {got}; {remedy}"
    )


def fitting(cfg: Config) -> int | None:
    """Return a smaller `gold.batch_size` for which the memory suffices, by halving; None if there is none."""
    assert isinstance(cfg.gold, RewardModelScorerConfig)
    size = cfg.gold.batch_size // 2
    while size >= 2:  # the two responses of a pair
        changed = replace(cfg, gold=replace(cfg.gold, batch_size=size))
        if all(use.fits for use in plan(changed).uses):
            return size
        size //= 2
    return None
