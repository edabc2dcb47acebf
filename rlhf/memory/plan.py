"""The memory plan of a run, and messages about it: rows, warnings, errors with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlhf.config.generators import Transfer
from rlhf.config.models import Device, Dtype
from rlhf.config.root import Config
from rlhf.config.schema import data_file, plain, value_at
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.machine import Machine, this_machine
from rlhf.memory.sizes import judges, longest, models
from rlhf.memory.uses import CONTEXT, NEARLY, Part, Phase, Plan, Trainer, Use, Workers, gib, nccl

# The memory plan of a run: the memory that each device needs, estimated before anything is loaded.
#
# A device needs some parts during the whole run (weights, optimizer states, processes) and others in
# phases, one after the other (training, sampling, log-probs and scores). Its peak memory is the sum of the
# permanent parts and of the largest phase. Weights, gradients and optimizer states are counted exactly.
# Activations are estimated (`rlhf.memory.uses`) for sequences of the maximum length, so the real need is
# often smaller.

PAIRS = 256  # pairs that `rlhf.relabel` passes to the judge at once, between two steps of the progress bar


def plan(cfg: Config, machine: Machine | None = None, trains: bool = True) -> Plan:
    """Return the memory plan of a command.

    The plan is empty for tiny stand-ins, and if no model is loaded. If the size of a model is unknown, the
    plan lists only unknown models.

    Args:
        cfg: the config of the run.
        machine: the machine; None: this machine.
        trains: whether the config is carried out; False: `rlhf.relabel`, which loads only its judges.
    """
    machine = machine or this_machine()
    if trains:
        return _planned(with_token_limit(cfg, machine), machine)
    return _planned(cfg.with_({"schedule.prompts_per_update": PAIRS}), machine, trains=False)


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
    for use in _planned(cfg, machine).uses:
        passes = replace(use, phases=tuple(phase for phase in use.phases if phase.name != "sampling"))
        if use.total is not None and passes.bytes > NEARLY * use.total:
            return False
    return True


def _planned(cfg: Config, machine: Machine, trains: bool = True) -> Plan:
    loads = models if trains else judges
    loaded = () if cfg.stand_ins else tuple(loads(cfg))  # stand-ins are tiny models, which fit everywhere
    unknown = {model.key: str(model.name) for model in loaded if model.size is None}
    if not loaded or unknown:
        return Plan((), unknown)
    trainer = Trainer(cfg, loaded, world_size(), device(cfg, machine))
    workers = Workers(trainer, local_world_size())
    phases = [phase for phase in trainer.phases() if trains or phase.bytes]
    if trainer.device == "cuda":
        uses = _with_gpus(workers, machine, phases) if trains else [_on_ranks(workers, machine, phases)]
        return Plan(tuple(uses), {})
    local, generators = workers.local, workers.generators
    parts = [part.times(local) for part in trainer.parts()]
    if trains:
        parts += [part.times(local) for part in trainer.in_ram()]
        parts += [part.times(generators, on_heap=True) for part in workers.in_ram(machine.ram)]
    on_host = [
        Phase(each.name, tuple(part.times(local, on_heap=True) for part in each.parts)) for each in phases
    ]
    return Plan((Use.of("RAM", machine.ram, parts, on_host),), {})


def _on_ranks(
    workers: Workers, machine: Machine, phases: Iterable[Phase], others: Iterable[Part] = (), groups: int = 0
) -> Use:
    """Return the memory on the GPU of each rank.

    Args:
        workers: the ranks and the other processes of this host.
        machine: the memory of this host.
        phases: the phases of an update.
        others: parts of other processes on the GPU.
        groups: number of groups of NCCL, besides that of the ranks.
    """
    trainer, local = workers.trainer, workers.local
    messages = nccl(int(trainer.ranks > 1) + groups)
    parts = [Part("CUDA", CONTEXT, "one process"), *messages, *trainer.parts(), *others]
    name = f"GPU {' '.join(map(str, range(local)))}"
    return Use.of(name, min(machine.gpus[:local], default=None), parts, phases)


def _with_gpus(workers: Workers, machine: Machine, phases: list[Phase]) -> Iterator[Use]:
    """Yield the memory of an inference engine, of the ranks, of processes on other GPUs, and in RAM."""
    trainer, gpus, local = workers.trainer, machine.gpus, workers.local
    generator, others = trainer.cfg.generator, []
    if reserved := generator.reserves(on_gpu=True):
        devices = generator.reserved_gpus(local)
        if generator.shares_gpu:
            made_of = f"{reserved.share:g} of the GPU (generator.memory), freed during training"
            share = Part(reserved.engine, reserved.share * min(gpus[:local], default=0), made_of)
            phases = [*phases, Phase("sampling", (share, *trainer.unreleased()))]
            others.append(Part(f"{reserved.engine}: CUDA", CONTEXT, "its process"))
        smallest = min((gpus[i] for i in devices if i < len(gpus)), default=None)
        total = None if smallest is None else int(reserved.share * smallest)
        name = f"{reserved.engine}'s share of GPU {' '.join(map(str, devices))}"
        yield Use(name, total, tuple(workers.of_engine(reserved)))
    found = workers.on_gpus(len(gpus))
    on_ranks = [parts for gpu, parts in found.items() if gpu < local]
    others += max(on_ranks, key=lambda parts: sum(part.bytes for part in parts), default=[])
    if workers.route is not Transfer.shared_memory:  # weights in transfer are on the trainer's GPU
        others.append(workers.in_transfer())
    yield _on_ranks(workers, machine, phases, others, groups=int(workers.route is Transfer.nccl))
    yield from workers.own_gpus(found, gpus)
    loading = Phase("loading", (trainer.loading(local),))
    yield Use.of("RAM", machine.ram, workers.in_ram_beside_gpus(), [loading])


# Messages about the memory plan: rows of the summary, warnings, errors with a remedy.


def rows(made: Plan) -> Iterator[tuple[str, str]]:
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


def problems(cfg: Config, trains: bool = True) -> list[str]:
    """Return an error for each device that certainly has too little memory; see `plan`."""
    return [_too_little(cfg, use, trains) for use in plan(cfg, trains=trains).uses if not use.fits]


def warnings(cfg: Config, trains: bool = True) -> list[str]:
    """Return a warning for each device that may have too little memory; see `plan`."""
    found = []
    for use in plan(cfg, trains=trains).uses:
        if use.fits and use.total is not None and use.bytes > NEARLY * use.total:
            amounts = f"about {gib(use.bytes)} of the {gib(use.total)} of {use.device}"
            text = f"{'the run' if trains else 'relabelling'} may need {amounts} ({_in_short(use)})"
            lists = "; python -m rlhf.plan with the same arguments lists all parts" if trains else ""
            found.append(text + lists)
    return found


_SMALLER = (  # key, a value, a value with which a run needs less memory
    *(("generator.annotate", True, False), ("model.dtype", Dtype.float32, Dtype.bfloat16)),
    *(("model.gradient_checkpointing", False, True), ("model.lora.rank", 0, 16)),
)
_WORTH = 0.95  # settings that need more than this fraction of the memory are not named
_ADJUSTABLE: dict[str, str] = data_file("rlhf.memory", "phases.yaml")["smaller"]


def _too_little(cfg: Config, use: Use, trains: bool) -> str:
    """Return the error about a device with too little memory, with settings that fit if there are any."""
    unfit = {each.device for each in plan(cfg, trains=trains).uses if not each.fits}

    def fits(changed: Config) -> bool:
        uses = plan(changed, trains=trains).uses
        return {each.device for each in uses if not each.fits} <= unfit - {use.device}

    first = next(models(cfg) if trains else judges(cfg))
    key, got = first.key, first.name
    if found := next((each for each in _changes(cfg, use.largest.name, trains) if fits(each[2])), None):
        remedy = f"set {' '.join(found[1])}"
        if found[0]:
            key, got = found[0], plain(value_at(cfg, found[0]))
    elif not trains:
        lower = ", or set model.dtype=bfloat16" if cfg.model.dtype is Dtype.float32 else ""
        remedy = f"set {key} to a smaller model{lower}"
    elif cfg.start is None:  # the run makes the model
        key, got = "model.hidden_size", plain(value_at(cfg, "model.hidden_size"))
        remedy = "set model.hidden_size=128"
    else:
        others = [f"set {override}" for override in smaller_settings(cfg)]
        remedy = ", or ".join([f"set {key} to a smaller model", *others])
    assert use.total is not None
    return (
        f"{key} must be small enough for the {gib(use.total)} of {use.device} "
        f"({'the run' if trains else 'relabelling'} is estimated to need {gib(use.bytes)}: "
        f"{_in_short(use)}), got {got}; {remedy}"
    )


def _changes(cfg: Config, phase: str, trains: bool) -> Iterator[tuple[str | None, list[str], Config]]:
    """Yield changes that reduce the memory of a run: the single key that changes, overrides, the config.

    The changes are the values half, quarter, ... of the key that makes the largest phase smaller, other
    shares of an engine on the trainer's GPU, the nearest first, and one after the other the settings of
    `_smaller_configs`.

    Args:
        cfg: the config of the run.
        phase: the largest phase.
        trains: see `plan`.
    """
    key, step = (adjustable(cfg, phase), cfg.algo.samples_per_prompt) if trains else ("gold.batch_size", 2)
    changed, overrides = cfg, []
    while key and (half := halved(changed, key, step)):
        changed = changed.with_({key: half})
        yield key, [f"{key}={half}"], changed
    reserved = cfg.generator.reserves(on_gpu=True) if trains and cfg.generator.shares_gpu else None
    if reserved is not None:
        for share in sorted((i / 20 for i in range(1, 20)), key=lambda each: abs(each - reserved.share)):
            memory = "generator.memory"
            yield memory, [f"{memory}={share:g}"], cfg.with_({memory: share})
    while trains and cfg.start and (found := _smaller_configs(cfg)):
        override, cfg = next(iter(found.items()))
        overrides.append(override)
        yield None, overrides, cfg


def adjustable(cfg: Config, phase: str) -> str | None:
    """Return the key that makes a phase of the plan smaller, or None."""
    key = _ADJUSTABLE.get(phase)
    evaluates = key == "generator.batch_size" and not cfg.generator.samples
    return "eval.batch_size" if evaluates else key


def halved(cfg: Config, key: str, step: int) -> int:
    """Return half the value of a key, as a multiple of `step`; 0 if the section has no such key."""
    section, _, name = key.partition(".")
    half: int = getattr(getattr(cfg, section), name, 0) // 2 // step * step
    return half


def smaller_settings(cfg: Config) -> list[str]:
    """Return overrides that reduce the memory of the run, without overrides that the run already has."""
    backends = [f"backend={name}" for name in ("zero3", "zero3_offload") if name != cfg.backend.name]
    return [*_smaller_configs(cfg), *backends]


def _smaller_configs(cfg: Config) -> dict[str, Config]:
    """Return overrides of single keys that reduce the memory of the run -> the config with the override."""
    return {
        f"{key}={plain(new)}": cfg.with_({key: new})
        for key, old, new in _SMALLER
        if value_at(cfg, key) == old
    }


def savings(cfg: Config) -> tuple[str, dict[str, float]]:
    """Return the fullest device of the memory plan, and settings with which it needs less: override -> bytes.

    Each setting is estimated alone. The settings are `_smaller_configs`, half of the sequences of a forward
    pass and of sampling, and half of the response length. The setting that needs the least memory is first.
    """
    now = _fullest(plan(cfg))
    options = _smaller_configs(cfg)
    keys = [key for phase in _ADJUSTABLE if (key := adjustable(cfg, phase)) is not None]
    for key in dict.fromkeys([*keys, "generator.response_length"]):
        step = 1 if key == "generator.response_length" else cfg.algo.samples_per_prompt
        if half := halved(cfg, key, step):
            options[f"{key}={half}"] = cfg.with_({key: half})
    sizes = {override: _fullest(plan(changed), now.device).bytes for override, changed in options.items()}
    least = {override: size for override, size in sizes.items() if size < _WORTH * now.bytes}
    return now.device, dict(sorted(least.items(), key=lambda item: item[1]))


def _fullest(made: Plan, device: str | None = None) -> Use:
    """Return the use of a device, by default of the device whose memory is used most."""
    uses = [use for use in made.uses if device in (None, use.device)]
    return max(uses, key=lambda use: use.bytes / (use.total or 1))
