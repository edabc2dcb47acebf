"""The memory plan of a run, and messages about it: rows, warnings, errors with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rlhf.config.backends import Device
from rlhf.config.models import Dtype
from rlhf.config.schema import value_at
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import this_machine
from rlhf.memory import generator as sampling
from rlhf.memory.sizes import judges, longest, models
from rlhf.memory.trainer import Trainer
from rlhf.memory.uses import (
    CONTEXT,
    LIBRARIES,
    NEARLY,
    PROCESS,
    Part,
    Phase,
    Plan,
    Use,
    gib,
    kept,
    nccl,
    on_heap,
    times,
)
from rlhf.words.catalogue import options

if TYPE_CHECKING:
    from rlhf.config.root import Config
    from rlhf.core.machine import Machine
    from rlhf.memory.sizes import Model


# The memory plan of a run: the memory that each device needs, estimated before anything is loaded.
#
# A device needs some parts during the whole run (weights, optimizer states, processes) and others in phases,
# one after the other (training, sampling, log-probs and scores). Its peak memory is the sum of the permanent
# parts and of the largest phase. Weights, gradients and optimizer states are counted exactly. Activations are
# estimated (`rlhf.memory.uses`) for sequences of the maximum length, so the real need is often smaller.
# This module imports no torch.


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of the run `cfg` on `machine`, by default this machine.

    The plan is empty for tiny stand-ins. If the size of a model is unknown, the plan lists only unknown
    models.
    """
    machine = machine or this_machine()
    return _planned(with_token_limit(cfg, machine), machine)


def plan_of_judges(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of ranks that only score texts, with the judges of `cfg`; see `plan`.

    The plan is empty if no judge is a model.
    """
    machine = machine or this_machine()
    loaded = () if cfg.stand_ins else tuple(judges(cfg))
    if not loaded or _unknown(loaded):
        return Plan((), _unknown(loaded))
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    phases = [phase for phase in trainer.phases() if phase.bytes]
    if trainer.device == "cuda":
        return Plan((_on_gpus_of_ranks(trainer, machine, (), phases),), {})
    return Plan((_without_gpus(machine, trainer.parts(), (), phases),), {})


def fills_memory(cfg: Config, machine: Machine | None = None) -> bool:
    """Return whether the memory plan limits forward passes.

    This is the case if `backend.tokens` is 0, or if it is null on a GPU, or on a CPU with too little memory
    for passes without a limit.
    """
    machine, tokens = machine or this_machine(), cfg.backend.tokens
    if tokens is None and device(cfg, machine) == "cpu":
        return not _passes_fit(cfg, machine)
    return not tokens


def with_token_limit(cfg: Config, machine: Machine | None = None) -> Config:
    """Return `cfg`, with `backend.tokens` set to the limit that fits into the memory if `fills_memory`.

    The limit is that of `backend.micro_batch` sequences of the maximum length, halved until forward passes
    are estimated to need at most `NEARLY` of every device, or until it is that of the samples of one prompt.
    """
    machine = machine or this_machine()
    if not fills_memory(cfg, machine):
        return cfg
    group = cfg.algo.samples_per_prompt
    prompts = max(1, cfg.backend.micro_batch // group)
    while True:
        found = cfg.with_({"backend.tokens": prompts * group * longest(cfg)})
        if prompts == 1 or _passes_fit(found, machine):
            return found
        prompts //= 2


def device(cfg: Config, machine: Machine) -> str:
    """Return the type of the device of the ranks, "cuda" or "cpu"."""
    wanted = cfg.backend.device
    return "cuda" if wanted is Device.cuda or (wanted is Device.auto and machine.gpus) else "cpu"


def _passes_fit(cfg: Config, machine: Machine) -> bool:
    """Return whether all phases except sampling need at most `NEARLY` of every device."""
    uses = _planned(cfg, machine).uses
    return all(use.total is None or use.without("sampling").bytes <= NEARLY * use.total for use in uses)


def _planned(cfg: Config, machine: Machine) -> Plan:
    loaded = () if cfg.stand_ins else tuple(models(cfg))  # stand-ins are tiny models, which fit everywhere
    if not loaded or _unknown(loaded):
        return Plan((), _unknown(loaded))
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    if trainer.device == "cuda":
        return Plan(tuple(_with_gpus(cfg, trainer, machine)), {})
    many = sampling.generators(cfg, local_world_size())
    others = [times(on_heap(part), many) for part in sampling.parts_in_ram(cfg, trainer, machine.ram)]
    parts = (*trainer.parts(), *trainer.in_ram())
    return Plan((_without_gpus(machine, parts, others, trainer.phases()),), {})


def _unknown(loaded: Iterable[Model]) -> dict[str, str]:
    return {model.key: str(model.name) for model in loaded if model.size is None}


def _without_gpus(
    machine: Machine, parts: Iterable[Part], others: Iterable[Part], phases: Iterable[Phase]
) -> Use:
    """Return the memory of a host without GPUs: parts and phases of each rank, parts of other processes."""
    local = local_world_size()
    on_host = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts)) for phase in phases
    ]
    return Use("RAM", machine.ram, kept([*(times(part, local) for part in parts), *others]), tuple(on_host))


def _on_gpus_of_ranks(
    trainer: Trainer, machine: Machine, others: Iterable[Part], phases: Iterable[Phase], groups: int = 0
) -> Use:
    """Return the memory on the GPU of each rank.

    Args:
        trainer: the memory of one rank.
        machine: the memory of this host.
        others: parts of other processes on the GPU.
        phases: the phases of an update.
        groups: number of groups of NCCL, besides that of the ranks.
    """
    local = local_world_size()
    messages = nccl(int(trainer.ranks > 1) + groups)
    parts = [Part("CUDA", CONTEXT, "one process"), *messages, *trainer.parts(), *others]
    total = min(machine.gpus[:local], default=None)
    return Use(f"GPU {_numbers(range(local))}", total, kept(parts), tuple(phases))


def _with_gpus(cfg: Config, trainer: Trainer, machine: Machine) -> Iterator[Use]:
    """Yield the memory of an inference engine, of the ranks, of processes on other GPUs, and in RAM."""
    gpus, generator, local = machine.gpus, cfg.generator, local_world_size()
    many = sampling.generators(cfg, local)
    others, phases = [], list(trainer.phases())
    if reserved := generator.reserves(on_gpu=True):
        devices = generator.reserved_gpus(local)
        if generator.shares_gpu:
            made_of = f"{reserved.share:g} of the GPU (generator.memory), freed during training"
            share = Part(reserved.engine, reserved.share * min(gpus[:local], default=0), made_of)
            phases.append(Phase("sampling", (share, *trainer.unreleased())))
            others.append(Part(f"{reserved.engine}: CUDA", CONTEXT, "its process"))
        smallest = min((gpus[i] for i in devices if i < len(gpus)), default=None)
        yield Use(
            f"{reserved.engine}'s share of GPU {_numbers(devices)}",
            None if smallest is None else int(reserved.share * smallest),
            tuple(sampling.parts_of_engine(reserved, trainer)),
        )
    workers = sampling.parts_on_gpus(cfg, trainer, len(gpus), local)
    others += sampling.shared_with_ranks(workers, local)
    if sampling.sent_on_gpu(cfg):
        others.append(sampling.weights_in_transfer(cfg, trainer))
    yield _on_gpus_of_ranks(trainer, machine, others, phases, groups=int(sampling.sent_by_nccl(cfg)))
    yield from sampling.own_gpus(workers, gpus, local)
    ram = [Part("processes", PROCESS * (local + sampling.processes(cfg) * many), LIBRARIES)]
    ram += [times(part, local) for part in trainer.in_ram()]
    if cfg.has_worker and not sampling.sent_on_gpu(cfg):
        ram.append(times(sampling.weights_in_transfer(cfg, trainer), many))
    if sampling.annotates(cfg, trainer.ranks, on_gpu=True):
        ram.append(times(Part("annotator's process", PROCESS, LIBRARIES), many))
    loads = 1 if trainer.only_first_loads else local  # hosts without rank 0 then load no models
    yield Use("RAM", machine.ram, kept(ram), (Phase("loading", (times(trainer.loading(), loads),)),))


def _numbers(gpus: Iterable[int]) -> str:
    return " ".join(map(str, gpus))


# Messages about the memory plan: rows of the summary, warnings, errors with a remedy.


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


# The memory plan of `rlhf.relabel`, which loads only the judge.


PAIRS = 256  # pairs that are passed to the judge at once, and between two steps of the progress bar


def relabelling_plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """Return the memory plan of relabelling with the config `cfg` on `machine`, by default this machine.

    The plan is empty if no judge is a model. If the size of a judge is unknown, the plan lists only unknown
    models.
    """
    return plan_of_judges(cfg.with_({"schedule.prompts_per_update": PAIRS}), machine)


def relabelling_problems(cfg: Config) -> list[str]:
    """Return an error for each device that certainly has too little memory to relabel with `cfg`."""
    return [_too_little_for_judge(cfg, use) for use in relabelling_plan(cfg).uses if not use.fits]


def relabelling_warnings(cfg: Config) -> list[str]:
    """Return a warning for each device that may have too little memory to relabel with `cfg`."""
    return [f"relabelling {text}" for text in nearly_full(relabelling_plan(cfg))]


def _too_little_for_judge(cfg: Config, use: Use) -> str:
    judge, step = next(judges(cfg)), 2  # the two responses of a pair
    size = smaller(cfg, "gold", "batch_size", step, _judge_fits)
    if size is not None:
        remedy = f"set gold.batch_size={size}"
        return refusal(use, "relabelling", "gold.batch_size", cfg.gold.sequences, remedy)
    remedy = f"set {judge.key} to a smaller model"
    if cfg.model.dtype is Dtype.float32:
        remedy += ", or set model.dtype=bfloat16"
    return refusal(use, "relabelling", judge.key, judge.name, remedy)


def _judge_fits(cfg: Config) -> bool:
    return all(use.fits for use in relabelling_plan(cfg).uses)
