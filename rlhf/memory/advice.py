"""Messages of the memory plan: tables, warnings, errors with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.catalogue import options
from rlhf.config.model import Dtype, NanoConfig
from rlhf.memory.loaded_models import models
from rlhf.memory.plan import plan
from rlhf.memory.uses import NEARLY, gib

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.memory.uses import Use


def rows(cfg: Config) -> Iterator[tuple[str, str]]:
    """The plan in short, a row for each device: name and value."""
    made = plan(cfg)
    if made.unknown:
        yield "memory (estimate)", not_known(made.unknown)
    for use in made.uses:
        total = "" if use.total is None else f" of {gib(use.total)}"
        yield f"memory ({use.device})", f"about {gib(use.bytes)}{total}: {in_short(use)}"


def in_short(use: Use, count: int = 4) -> str:
    """The largest things in a use."""
    named: dict[str, float] = {}
    for part in use.parts:
        role = part.name.partition(":")[0]
        named[role] = named.get(role, 0) + part.bytes
    if use.largest.bytes:
        named[use.largest.name] = use.largest.bytes
    largest = sorted(named.items(), key=lambda item: -item[1])
    told = [f"{name} {gib(amount)}" for name, amount in largest[:count]]
    return ", ".join(told) + (", ..." if len(largest) > count else "")


def not_known(unknown: dict[str, str]) -> str:
    """What is said where models are not here yet."""
    return "not known before these are downloaded: " + ", ".join(f"{k}={v}" for k, v in unknown.items())


def problems(cfg: Config) -> list[str]:
    """One sentence for each device that has clearly too little memory for the run `cfg`."""
    return [too_little(cfg, use) for use in plan(cfg).uses if not use.fits]


def warnings(cfg: Config) -> list[str]:
    """One sentence for each device that may have too little."""
    return [
        f"the run may need about {gib(use.bytes)} of the {gib(use.total)} of {use.device} "
        f"({in_short(use)}); python -m rlhf.plan with the same words tells what for"
        for use in plan(cfg).uses
        if use.fits and use.total is not None and use.bytes > NEARLY * use.total
    ]


ADJUSTABLE = {  # by phase: what makes it smaller
    "training": ("backend", "micro_batch"),
    "log-probs and scores": ("backend", "micro_batch"),
    "sampling": ("generator", "batch_size"),
}


def too_little(cfg: Config, use: Use) -> str:
    """The error for a device with too little memory: key, rule, reason, value, remedy."""
    assert use.total is not None
    section, name = ADJUSTABLE.get(use.largest.name, ("", ""))
    if section == "generator" and not cfg.generator.samples:
        section = "eval"
    fitting = smaller(cfg, use.device, section, name) if section else None
    first = next(models(cfg))
    if fitting is not None:
        key, got = f"{section}.{name}", getattr(getattr(cfg, section), name)
        remedy = f"set {key}={fitting}"
    elif first.name is None and isinstance(cfg.model, NanoConfig):
        key, got = "model.hidden_size", cfg.model.hidden_size
        remedy = "set model.hidden_size=128"
    else:
        key, got = first.key, first.name
        remedy = ", or ".join([f"set {key} to a smaller model", *(f"set {word}" for word in others(cfg))])
    return (
        f"{key} must leave the run within the {gib(use.total)} of {use.device} (it is estimated to need "
        f"{gib(use.bytes)}: {in_short(use)}), got {got}; {remedy}"
    )


def smaller(cfg: Config, device: str, section: str, name: str) -> int | None:
    """The largest smaller value of a key with which the device has enough; None where there is none."""
    part = getattr(cfg, section)
    group = cfg.algo.samples_per_prompt
    value = getattr(part, name, 0) // 2 // group * group
    while value >= group:
        changed = replace(cfg, **{section: replace(part, **{name: value})})
        if all(use.fits for use in plan(changed).uses if use.device == device):
            return value
        value = value // 2 // group * group
    return None


def others(cfg: Config) -> list[str]:
    """Other settings that make a run smaller, of those that there are and that it has not."""
    found = []
    if cfg.model.dtype is Dtype.float32:
        found.append("model.dtype=bfloat16")
    if not cfg.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing=true")
    if not cfg.model.lora.rank:
        found.append("model.lora.rank=16")
    found += [
        f"backend={name}"
        for name in ("zero3", "zero3_offload")
        if name in options("backend") and name != cfg.backend.name
    ]
    return found
