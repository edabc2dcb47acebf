"""Messages about the memory plan: rows of the summary, warnings, errors with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf.config.catalogue import options
from rlhf.config.schema import value_at
from rlhf.memory.loaded_models import models
from rlhf.memory.plan import plan
from rlhf.memory.uses import NEARLY, gib

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.memory.uses import Plan, Use


def rows(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield a row (name, value) for the summary of a run, for each device of the memory plan."""
    yield from rows_of(plan(cfg))


def rows_of(made: Plan) -> Iterator[tuple[str, str]]:
    """Yield a row (name, value) for each device of a memory plan."""
    if made.unknown:
        yield "memory (estimate)", unknown_models(made.unknown)
    for use in made.uses:
        total = "" if use.total is None else f" of {gib(use.total)}"
        yield f"memory ({use.device})", f"about {gib(use.bytes)}{total}: {_in_short(use)}"


def _in_short(use: Use, count: int = 4) -> str:
    """Return the `count` largest items of a device as text: permanent parts by model, the largest phase."""
    sizes: dict[str, float] = {}
    for part in use.parts:
        role = part.name.partition(":")[0]
        sizes[role] = sizes.get(role, 0) + part.bytes
    if use.largest.bytes:
        sizes[use.largest.name] = use.largest.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    texts = [f"{name} {gib(amount)}" for name, amount in largest[:count]]
    return ", ".join(texts) + (", ..." if len(largest) > count else "")


def unknown_models(unknown: dict[str, str]) -> str:
    """Return the text for a plan with models that are not on this machine."""
    return "unknown until these models are downloaded: " + ", ".join(f"{k}={v}" for k, v in unknown.items())


def problems(cfg: Config) -> list[str]:
    """Return an error for each device that certainly has too little memory for the run `cfg`."""
    return [_too_little(cfg, use) for use in plan(cfg).uses if not use.fits]


def warnings(cfg: Config) -> list[str]:
    """Return a warning for each device that may have too little memory for the run `cfg`."""
    return [
        f"the run {text}; python -m rlhf.plan with the same arguments lists all parts"
        for text in nearly_full(plan(cfg))
    ]


def nearly_full(made: Plan) -> Iterator[str]:
    """Yield what a plan needs of each device that may have too little memory, as a part of a sentence."""
    for use in made.uses:
        if use.fits and use.total is not None and use.bytes > NEARLY * use.total:
            yield (
                f"may need about {gib(use.bytes)} of the {gib(use.total)} of {use.device} ({_in_short(use)})"
            )


_WORTH = 0.95  # settings that need more than this fraction of the memory are not named
_ADJUSTABLE = {  # phase -> section and name of the key that makes the phase smaller
    "training": ("backend", "micro_batch"),
    "log-probs and scores": ("backend", "micro_batch"),
    "sampling": ("generator", "batch_size"),
}


def refusal(use: Use, what: str, key: str, got: object, remedy: str) -> str:
    """Return the error message for a device with too little memory: key, rule, reason, value, remedy.

    Args:
        use: the memory that is needed of the device.
        what: what needs it, for example "the run".
        key: the config key that should have a smaller value.
        got: the value of the key.
        remedy: what to do instead.
    """
    assert use.total is not None
    return (
        f"{key} must be small enough for the {gib(use.total)} of {use.device} ({what} is estimated to need "
        f"{gib(use.bytes)}: {_in_short(use)}), got {got}; {remedy}"
    )


def _too_little(cfg: Config, use: Use) -> str:
    adjusted, group = adjustable(cfg, use.largest.name), cfg.algo.samples_per_prompt
    fitting = adjusted and smaller(cfg, *adjusted, group, lambda changed: _fits(changed, use.device))
    first = next(models(cfg))
    made = cfg.model.architecture(cfg.task.vocabulary_size)
    if adjusted and fitting:
        key = ".".join(adjusted)
        got, remedy = value_at(cfg, key), f"set {key}={fitting}"
    elif (shares := _fitting_share(cfg)) is not None:
        key, got = "generator.memory", shares[0]
        remedy = f"set {key}={shares[1]:g}"
    elif first.name is None and made:
        key, got, remedy = "model.hidden_size", made["hidden_size"], "set model.hidden_size=128"
    elif together := _together_fitting(cfg, use.device):
        key, got, remedy = first.key, first.name, f"set {' '.join(together)}"
    else:
        key, got = first.key, first.name
        alternatives = [f"set {override}" for override in smaller_settings(cfg)]
        remedy = ", or ".join([f"set {key} to a smaller model", *alternatives])
    return refusal(use, "the run", key, got, remedy)


def _fits(cfg: Config, device: str) -> bool:
    return all(use.fits for use in plan(cfg).uses if use.device == device)


def adjustable(cfg: Config, phase: str) -> tuple[str, str] | None:
    """Return section and name of the key that makes a phase of the plan smaller, or None."""
    section, name = _ADJUSTABLE.get(phase, ("", ""))
    if section == "generator" and not cfg.generator.samples:
        section = "eval"
    return (section, name) if section else None


def smaller(cfg: Config, section: str, name: str, step: int, fits: Callable[[Config], bool]) -> int | None:
    """Return a smaller value of a key with which the config `fits`, or None if there is none.

    The first value is half the configured value; each following value is half the previous value.

    Args:
        cfg: the config of the run.
        section: the section of the key.
        name: the name of the key; a section without it has no smaller value.
        step: values are rounded down to multiples of it.
        fits: whether the memory suffices for a config.
    """
    value = getattr(getattr(cfg, section), name, 0) // 2 // step * step
    while value >= step:
        if fits(cfg.with_({f"{section}.{name}": value})):
            return value
        value = value // 2 // step * step
    return None


def _fitting_share(cfg: Config) -> tuple[float, float] | None:
    """Return the configured share of an engine on the trainer's GPU, and the nearest share that fits.

    Returns:
        Two values of `generator.memory`; None without such an engine on a GPU, or if no share fits.
    """
    reserved = cfg.generator.reserves(on_gpu=True)
    if reserved is None or not cfg.generator.shares_gpu:
        return None
    now = reserved.share
    for share in sorted((i / 20 for i in range(1, 20)), key=lambda each: abs(each - now)):
        uses = plan(cfg.with_({"generator.memory": share})).uses
        if len(uses) > 1 and all(use.fits for use in uses):
            return now, share
    return None


def _together_fitting(cfg: Config, device: str) -> list[str]:
    """Return the first settings of `_smaller_configs` that together fit the device; empty if all do not."""
    used = []
    while found := _smaller_configs(cfg):
        override, cfg = next(iter(found.items()))
        used.append(override)
        if _fits(cfg, device):
            return used
    return []


def smaller_settings(cfg: Config) -> list[str]:
    """Return overrides that reduce the memory of the run, without overrides that the run already has."""
    backends = (name for name in ("zero3", "zero3_offload") if name in options("backend"))
    return [*_smaller_configs(cfg), *(f"backend={name}" for name in backends if name != cfg.backend.name)]


def _smaller_configs(cfg: Config) -> dict[str, Config]:
    """Return overrides of single keys that reduce the memory of the run -> the config with the override."""
    return {
        f"{name}.{key}": cfg.with_({name: changed})
        for name, section in (("generator", cfg.generator), ("model", cfg.model))
        for key, changed in section.smaller().items()
    }


def savings(cfg: Config) -> tuple[str, dict[str, float]]:
    """Return the fullest device of the memory plan, and settings with which it needs less: override -> bytes.

    Each setting is estimated alone. The settings are `_smaller_configs`, half of the sequences of a forward
    pass and of sampling, and half of the response length. The setting that needs the least memory is first.
    """
    now = _fullest(plan(cfg))
    options, group = _smaller_configs(cfg), cfg.algo.samples_per_prompt
    keys = [each for phase in _ADJUSTABLE if (each := adjustable(cfg, phase)) is not None]
    for section, name in dict.fromkeys([*keys, ("generator", "response_length")]):
        step = 1 if name == "response_length" else group
        if half := getattr(getattr(cfg, section), name, 0) // 2 // step * step:
            options[f"{section}.{name}={half}"] = cfg.with_({f"{section}.{name}": half})
    sizes = {override: _fullest(plan(changed), now.device).bytes for override, changed in options.items()}
    least = {override: size for override, size in sizes.items() if size < _WORTH * now.bytes}
    return now.device, dict(sorted(least.items(), key=lambda item: item[1]))


def _fullest(made: Plan, device: str | None = None) -> Use:
    """Return the use of a device, by default of the device whose memory is used most."""
    uses = [use for use in made.uses if device in (None, use.device)]
    return max(uses, key=lambda use: use.bytes / (use.total or 1))
