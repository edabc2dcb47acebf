"""The memory plan of a run: what each device will need, estimated before anything is loaded, without torch.

A device holds some parts all the time (weights, optimizer states, a generator's process) and others in turn
(training, sampling, log-probs and scores); what it needs is the first and the largest of the second. Weights,
gradients and optimizer states are counted; activations are estimated (`rlhf.memory.activations`), for
sequences as long as the config allows, so that they may well be less.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhf import sharing
from rlhf.config import Config, Dtype, NanoConfig
from rlhf.engines.config import Device
from rlhf.generators.config import GeneratorConfig, HFConfig, Transfer, VLLMConfig, WorkerConfig
from rlhf.memory import activations
from rlhf.memory.activations import AUTOCAST, BFLOAT16, FLOAT32, Precision, Tokens
from rlhf.memory.footprint import Footprint
from rlhf.memory.machine import Machine, this_machine
from rlhf.memory.model_size import ModelSize, adapter_parameters, named_size, nano_size
from rlhf.objectives.config import PPOConfig, Trains, ValueFrom
from rlhf.options import options
from rlhf.scorers.config import RewardModelScorerConfig, scorers
from rlhf.tasks.config import EmbeddedTaskConfig

GIB = 2**30
MARGIN = 2.0  # by this factor activations may be less than estimated: few sequences have full length
HEAP = 1.5  # memory of a process for each byte of tensors that come and go: measured with glibc, 1.4 to 1.7
NEARLY = 0.9  # part of a device's memory from which on there is a warning
PROCESS = 0.6 * GIB  # a process with torch and transformers: measured on a CPU
CONTEXT = 0.6 * GIB  # what CUDA takes on a GPU for a process: as is usually seen, not measured here


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes `bytes`; `made_of` says how many of what."""

    name: str
    bytes: float
    made_of: str = ""
    estimated: bool = False  # else it is counted


@dataclass(frozen=True, slots=True)
class Phase:
    """What is there only for a time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Use:
    """What a device needs. `device` is RAM, or the GPU's number; `total`: None where it is not known."""

    device: str
    total: int | None
    parts: tuple[Part, ...]  # there all the time
    phases: tuple[Phase, ...] = ()  # one at a time

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("nothing else", ()))

    @property
    def bytes(self) -> float:
        """The most that is needed at a time."""
        return sum(part.bytes for part in self.parts) + self.largest.bytes

    @property
    def least(self) -> float:
        """The same if activations are as much smaller as they may be."""
        at_once = [self.parts + phase.parts for phase in self.phases or (self.largest,)]
        return max(sum(part.bytes / (MARGIN if part.estimated else 1) for part in parts) for parts in at_once)

    @property
    def fits(self) -> bool:
        """False where the device has clearly too little; True also where that is not known."""
        return self.total is None or self.least <= self.total


@dataclass(frozen=True, slots=True)
class Plan:
    """What the devices need; nothing is known where models are not on this machine: `unknown`, by key."""

    uses: tuple[Use, ...]
    unknown: dict[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the trainer's process. `key`: where the config names it; `size`: None where not known."""

    role: str
    key: str
    name: str | None  # hub name or folder; None: made on the way
    size: ModelSize | None
    trained: bool = False
    batch_size: int = 0  # sequences a forward without gradient
    adapters: int | None = None  # parameters of these, which are then trained alone

    @property
    def counted(self) -> ModelSize:
        """The size; a plan is made only where all are known."""
        assert self.size is not None
        return self.size

    @property
    def trainable(self) -> int:
        """Parameters that have gradients and optimizer states."""
        if not self.trained:
            return 0
        return self.counted.parameters if self.adapters is None else self.adapters


# -- the models ------------------------------------------------------------------------------------


def models(cfg: Config) -> Iterator[Model]:
    """The models that the trainer's process of `cfg` loads, those that are trained first."""
    model, algo, batch = cfg.model, cfg.algo, cfg.backend.micro_batch
    start = cfg.start
    policy = size_of(cfg, start)
    key = "model.base" if algo.trains is Trains.base else "model.policy"
    if algo.trains is Trains.reward:
        yield adapted(cfg, Model("reward model", key, start, policy and policy.scoring(), True, batch))
        return
    yield adapted(cfg, Model("policy", key, start, policy, True, batch))
    if isinstance(algo, PPOConfig):
        value = start
        if algo.starts_value(cfg) is ValueFrom.reward:
            key, value = "model.reward", algo.reward_model(cfg)
        size = size_of(cfg, value)
        yield adapted(cfg, Model("value model", key, value, size and size.scoring(), True, batch))
    if algo.trains is Trains.policy and not (model.lora.rank and model.starts_as_reference):
        name = model.reference or model.policy
        key = "model.reference" if model.reference else "model.policy"
        yield Model("reference", key, name, size_of(cfg, name), False, batch)
    for at, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig):
            key, name = (f"{at}.path", scorer.path) if scorer.path else ("model.reward", model.reward)
            role = "judge" if at.startswith("gold") else "reward model"
            size = size_of(cfg, name)
            yield Model(role, key, name, size and size.scoring(), False, scorer.batch_size)


def adapted(cfg: Config, model: Model) -> Model:
    """A model that is trained, with the adapters that the config wants; `modules_to_save` are not counted.

    A head of one number is trained whole.
    """
    lora = cfg.model.lora
    if not lora.rank or model.size is None:
        return model
    count = adapter_parameters(model.size, lora.rank, lora.targets)
    return replace(model, adapters=count + (model.size.head if model.size.vocabulary == 1 else 0))


def size_of(cfg: Config, name: str | None) -> ModelSize | None:
    """The size of the model `name`, or of the one that embedded tasks make; None where it is not known."""
    if name is not None:
        return named_size(name)
    if isinstance(cfg.model, NanoConfig) and isinstance(cfg.task, EmbeddedTaskConfig):
        return size_of(cfg, cfg.model.base) if cfg.model.base else made_size(cfg.model, cfg.task)
    return None


def made_size(model: NanoConfig, task: EmbeddedTaskConfig) -> ModelSize:
    """The size of the embedded model with the vocabulary of an embedded task."""
    return nano_size(model, task.vocabulary_size())


# -- the plan --------------------------------------------------------------------------------------


def plan(cfg: Config, machine: Machine | None = None) -> Plan:
    """What the run `cfg` needs on `machine`, by default this one."""
    if cfg.stand_ins:  # so small that nothing is to be planned
        return Plan((), {})
    machine = machine or this_machine()
    loaded = list(models(cfg))
    unknown = {model.key: str(model.name) for model in loaded if model.size is None}
    if unknown:
        return Plan((), unknown)
    wanted = cfg.backend.device
    on_gpu = wanted is Device.cuda or (wanted is Device.auto and bool(machine.gpus))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    trainer = Trainer(cfg, tuple(loaded), ranks, "cuda" if on_gpu else "cpu")
    if on_gpu:
        return Plan(tuple(on_gpus(cfg, trainer, machine, local)), {})
    parts = [times(part, local) for part in (*trainer.parts(), *trainer.in_ram())]
    many = generators(cfg, local)
    parts += [times(on_heap(part), many) for part in generator_parts(cfg, trainer, machine.ram)]
    phases = [
        Phase(phase.name, tuple(times(on_heap(part), local) for part in phase.parts))
        for phase in trainer.phases()
    ]
    return Plan((Use("RAM", machine.ram, kept(parts), tuple(phases)),), {})


def on_gpus(cfg: Config, trainer: Trainer, machine: Machine, local: int) -> Iterator[Use]:
    """GPUs of the trainer's ranks, GPUs of a generator that has its own, and RAM."""
    gpus, generator, many = machine.gpus, cfg.generator, generators(cfg, local)
    total = min(gpus[:local], default=None)
    parts, phases = [Part("CUDA", CONTEXT, "a process"), *trainer.parts()], list(trainer.phases())
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.on_gpu
        theirs = tuple(generator.devices or range(local, local + generator.gpus * many))
        if generator.shares_gpu:
            theirs = tuple(range(local))
            held = f"{share:g} of the GPU (generator.memory), given back in between"
            phases.append(Phase("sampling", (Part("vLLM", share * (total or 0), held),)))
        own = min((gpus[i] for i in theirs if i < len(gpus)), default=None)
        yield Use(
            f"vLLM's share of GPU {' '.join(map(str, theirs))}",
            None if own is None else int(share * own),
            tuple(vllm_on_gpu(generator, trainer)),
        )
    elif generator.has_worker(cfg):
        process = [Part("CUDA", CONTEXT, "the generator's process"), *hf_process(cfg, trainer)]
        together = -(-replicas(cfg) * many // max(1, len(gpus) - 1))  # on one GPU; rlhf.worker.environment
        parts += [times(part, together) for part in process]
    if on_gpu_store(generator):
        parts.append(shared_weights(cfg, trainer))
    names = " ".join(map(str, range(local)))
    yield Use(f"GPU {names}", total, kept(parts), tuple(phases))
    ram = [Part("processes", PROCESS * (local + replicas(cfg) * many), "Python, torch, libraries")]
    ram += [times(part, local) for part in trainer.in_ram()]
    if generator.has_worker(cfg) and not on_gpu_store(generator):
        ram.append(times(shared_weights(cfg, trainer), many))
    if isinstance(generator, VLLMConfig) and generator.shares_gpu:
        asleep = Part("vLLM asleep", vllm_weights(generator, trainer), "its weights while the trainer trains")
        ram.append(times(asleep, many))
    if isinstance(generator, WorkerConfig) and generator.annotates(cfg, trainer.ranks, on_gpu=True):
        ram.append(Part("annotator's process", PROCESS, "Python, torch, libraries"))
    yield Use("RAM", machine.ram, kept(ram), (Phase("loading", (times(trainer.loading(), local),)),))


def generators(cfg: Config, local: int) -> int:
    """How many times a host with `local` ranks has the generator, all its replicas."""
    return local if isinstance(cfg.generator, WorkerConfig) and cfg.generator.per_rank else 1


def on_gpu_store(generator: GeneratorConfig) -> bool:
    """Whether versions in transfer lie on the trainer's GPU: as `rlhf.generators.vllm.route` has it there."""
    if not isinstance(generator, VLLMConfig) or generator.transfer is Transfer.shared_memory:
        return False
    shares = generator.shares_gpu and generator.tensor_parallel_size > 1
    return generator.transfer is not Transfer.auto or (generator.replicas == 1 and not shares)


def on_heap(part: Part) -> Part:
    """A part in RAM, where what was freed is not all given back."""
    return replace(part, bytes=part.bytes * HEAP) if part.estimated else part


def times(part: Part, count: int) -> Part:
    """The same part in `count` processes."""
    return (
        part if count == 1 else replace(part, bytes=part.bytes * count, made_of=f"{count} x {part.made_of}")
    )


def kept(parts: list[Part]) -> tuple[Part, ...]:
    """The parts that take anything."""
    return tuple(part for part in parts if part.bytes)


@dataclass(frozen=True, slots=True)
class Trainer:
    """What one rank of the trainer needs on its device, `cpu` or `cuda`."""

    cfg: Config
    models: tuple[Model, ...]
    ranks: int
    device: str

    @property
    def policy(self) -> ModelSize:
        """The size of what is sampled from, or trained where nothing is."""
        return self.models[0].counted

    @property
    def eager(self) -> bool:
        """Whether attention keeps its probabilities."""
        return self.cfg.model.attention == "eager"

    def precision(self, trained: bool) -> Precision:
        """Of a model that is trained, or of a frozen one."""
        if self.cfg.model.dtype is Dtype.float32:
            return FLOAT32
        return AUTOCAST if trained and not self.cfg.model.lora.rank else BFLOAT16

    def tokens(self, sequences: int, samples: int) -> Tokens:
        """A forward of at most so many sequences (one prompt's at least), as long as the config allows."""
        cfg = self.cfg
        share = -(-cfg.schedule.prompts_per_update // self.ranks)
        prompts = max(1, min(sequences // samples, share))
        return Tokens(
            prompts=prompts,
            samples=samples,
            prompt=cfg.task.max_prompt_tokens,
            response=cfg.generator.response_length,
            apart=cfg.model.shared_prefix and self.prompt_apart(prompts, samples),
        )

    @property
    def gathers(self) -> bool:
        """Whether weights are divided over ranks, which then go through forwards together."""
        return self.cfg.backend.footprint(self.cfg).gathered

    def prompt_apart(self, prompts: int, samples: int) -> bool:
        """Whether prompts of full length are encoded in a pass of their own."""
        return sharing.prompt_apart(
            samples,
            prompts * self.cfg.task.max_prompt_tokens,
            layers=self.policy.layers,
            hidden=self.policy.hidden,
            gpu=self.device == "cuda",
            whole=self.gathers,
        )

    def encoded(self, tokens: Tokens) -> Iterator[Tokens]:
        """`tokens` and, where shorter prompts would not have a pass of their own, the longest of those."""
        yield tokens
        if tokens.apart and self.device == "cuda" and not self.gathers:
            shorter = sharing.spared_from(tokens.samples, self.policy.hidden) / tokens.prompts
            yield replace(tokens, prompt=max(1, int(shorter)), apart=False)

    def weights(self, model: Model) -> tuple[int, Footprint]:
        """How many weights are held as they are, and how: frozen ones in `model.dtype`."""
        footprint, count = self.cfg.backend.footprint(self.cfg), model.counted.parameters
        if model.trained and model.adapters is None:
            return count, footprint
        return count, replace(footprint, weights=self.precision(False).residual)

    def parts(self) -> Iterator[Part]:
        """Weights, adapters and optimizer states on the device."""
        footprint = self.cfg.backend.footprint(self.cfg)
        if self.device == "cpu":
            yield Part("process", PROCESS, "Python, torch, libraries")
        for model in self.models:
            count, held_as = self.weights(model)
            held = held_as.on_device("weights", count, self.ranks)
            yield Part(f"{model.role}: weights", held, parameters(count, held))
            if model.adapters is not None:
                held = footprint.on_device("weights", model.adapters, self.ranks)
                yield Part(f"{model.role}: adapters", held, parameters(model.adapters, held))
            if model.trained:
                held = footprint.on_device("optimizer", model.trainable, self.ranks)
                yield Part(f"{model.role}: optimizer", held, parameters(model.trainable, held))

    def in_ram(self) -> Iterator[Part]:
        """What the backend offloads."""
        footprint = self.cfg.backend.footprint(self.cfg)
        for model in self.models:
            count, held_as = self.weights(model)
            held = held_as.in_ram("weights", count, self.ranks)
            if model.adapters is not None:
                held += footprint.in_ram("weights", model.adapters, self.ranks)
            for kind in ("gradients", "optimizer"):
                held += footprint.in_ram(kind, model.trainable, self.ranks)
            yield Part(f"{model.role}: offloaded", held, parameters(count, held))

    def loading(self) -> Part:
        """All models, before they go to the GPU."""
        each = (count * held_as.weights for count, held_as in map(self.weights, self.models))
        return Part("models", sum(each), "before they go to the GPU")

    def gradients(self) -> Iterator[Part]:
        """Of what is trained, on the device; and a layer whose weights are brought together."""
        footprint = self.cfg.backend.footprint(self.cfg)
        for model in self.models:
            if model.trained:
                held = footprint.on_device("gradients", model.trainable, self.ranks)
                yield Part(f"{model.role}: gradients", held, parameters(model.trainable, held))
                if footprint.gathered:
                    size, held_as = model.counted, self.weights(model)[1]
                    layer = max(size.backbone // max(1, size.layers), size.vocabulary * size.hidden)
                    gradients = footprint.gradients if model.adapters is None else 0
                    yield Part(
                        f"{model.role}: one layer", layer * (held_as.weights + gradients), "from all ranks"
                    )

    def phases(self) -> Iterator[Phase]:
        """Training, the optimizer step, log-probs and scores, sampling in this process."""
        cfg, gradients = self.cfg, tuple(self.gradients())
        samples = cfg.algo.samples_per_prompt
        trained = cfg.algo.keeps or samples
        tokens = self.tokens(min(cfg.backend.micro_batch, minibatch(cfg, self.ranks)), trained)
        yield Phase(
            "training",
            (
                *gradients,
                *(
                    Part(
                        f"{model.role}: activations",
                        max(
                            activations.training(
                                model.counted,
                                each,
                                self.precision(True),
                                eager=self.eager,
                                device=self.device,
                                checkpointing=cfg.model.gradient_checkpointing,
                            )
                            for each in self.encoded(tokens)
                        ),
                        in_words(tokens),
                        estimated=True,
                    )
                    for model in self.models
                    if model.trained
                ),
            ),
        )
        footprint = cfg.backend.footprint(cfg)
        if self.device == "cuda" and "optimizer" not in footprint.offloaded:
            count = sum(model.trainable for model in self.models)
            held = footprint.step * count / (self.ranks if "optimizer" in footprint.sharded else 1)
            yield Phase("optimizer step", (*gradients, Part("updates", held, parameters(count, held))))
        reads = [
            Part(
                model.role,
                max(
                    activations.inference(
                        model.counted,
                        each,
                        self.precision(model.trained),
                        eager=self.eager,
                        device=self.device,
                    )
                    for each in self.encoded(asked)
                ),
                in_words(asked),
                estimated=True,
            )
            for model in self.models
            for asked in (self.tokens(model.batch_size, samples), self.tokens(model.batch_size, 1))
        ]
        yield Phase("log-probs and scores", (max(reads, key=lambda part: part.bytes),))
        if cfg.algo.trains is not Trains.reward and not isinstance(cfg.generator, WorkerConfig):
            yield Phase("sampling", (self.sampling(cfg.eval.batch_size, self.precision(True)),))
        elif isinstance(cfg.generator, HFConfig) and not cfg.generator.has_worker(cfg):
            yield Phase("sampling", (self.sampling(cfg.generator.batch_size, self.precision(True)),))

    def sampling(self, batch_size: int, precision: Precision) -> Part:
        """What decoding takes beside the weights, in training or for an evaluation."""
        cfg = self.cfg
        asked = [self.tokens(batch_size, cfg.algo.samples_per_prompt)] if cfg.generator.samples else []
        if cfg.schedule.eval_every:
            alone = self.tokens(batch_size, 1)
            asked.append(replace(alone, prompts=min(batch_size, cfg.eval.prompts)))
        parts = [
            Part(
                "keys, values, choice",
                activations.sampling(self.policy, tokens, precision, eager=self.eager, device=self.device),
                in_words(tokens),
                estimated=True,
            )
            for tokens in asked
        ]
        return max(parts, key=lambda part: part.bytes, default=Part("nothing", 0))


def minibatch(cfg: Config, ranks: int) -> int:
    """Sequences of an optimizer step on one rank."""
    prompts = cfg.schedule.prompts_per_update // max(1, cfg.schedule.minibatches)
    return -(-prompts // ranks) * (cfg.algo.keeps or cfg.algo.samples_per_prompt)


def generator_parts(cfg: Config, trainer: Trainer, ram: int) -> Iterator[Part]:
    """A generator's own process and what is shared with it, all in RAM."""
    generator = cfg.generator
    if not generator.has_worker(cfg):
        return
    yield shared_weights(cfg, trainer)
    held = [Part("generator's process", PROCESS, "Python, torch, libraries")]
    if isinstance(generator, VLLMConfig):
        share = generator.memory or generator.in_ram
        held.append(Part("vLLM: weights", vllm_weights(generator, trainer), precision_of(generator, cfg)))
        held.append(Part("vLLM: keys and values", share * ram, f"{share:g} of RAM (generator.memory)"))
    else:
        held += hf_process(cfg, trainer)
    for part in held:
        yield times(part, replicas(cfg))
    if isinstance(generator, WorkerConfig) and generator.annotates(cfg, trainer.ranks, on_gpu=False):
        yield from annotator_parts(trainer)


def annotator_parts(trainer: Trainer) -> Iterator[Part]:
    """A process that scores ahead, with models of its own: a whole reference also where the trainer's is
    the policy without its adapters.
    """
    yield Part("annotator's process", PROCESS, "Python, torch, libraries")
    loaded = {model.role: model for model in trainer.models}
    if trainer.cfg.algo.trains is Trains.policy:
        loaded.setdefault("reference", replace(trainer.models[0], trained=False, adapters=None))
    for role, model in loaded.items():
        if role in ("reference", "reward model"):
            count, held_as = trainer.weights(model)
            held = count * held_as.weights
            yield Part(f"annotator: {role}", held, parameters(count, held))


def replicas(cfg: Config) -> int:
    """How many processes the generator has."""
    generator = cfg.generator
    if not generator.has_worker(cfg):
        return 0
    return generator.replicas if isinstance(generator, WorkerConfig) else 1


def hf_process(cfg: Config, trainer: Trainer) -> Iterator[Part]:
    """A copy of the policy, and its decoding, on the trainer's device."""
    assert isinstance(cfg.generator, HFConfig)
    count = trainer.policy.parameters
    yield Part("generator: weights", 4 * count, parameters(count, 4 * count))
    held = trainer.sampling(cfg.generator.batch_size, trainer.precision(True))
    yield replace(held, name="generator: keys, values, choice")


def shared_weights(cfg: Config, trainer: Trainer) -> Part:
    """Versions of the weights: the one confirmed last, and those that wait."""
    generator = cfg.generator
    versions = max(2, replicas(cfg) + cfg.schedule.max_lag)
    if isinstance(generator, VLLMConfig) and on_gpu_store(generator):
        held = versions * vllm_weights(generator, trainer)
        said = f"{versions} versions in {precision_of(generator, cfg)}, on the trainer's GPU"
        return Part("weights in transfer", held, said)
    held = versions * 4 * trainer.policy.parameters
    return Part("weights in transfer", held, f"{versions} versions in float32, in shared memory")


def vllm_weights(generator: VLLMConfig, trainer: Trainer) -> float:
    """The weights of one vLLM, on all its GPUs together."""
    low = precision_of(generator, trainer.cfg) != "float32"
    return (2 if low else 4) * trainer.policy.parameters


def precision_of(generator: VLLMConfig, cfg: Config) -> str:
    """What vLLM computes in."""
    return str((generator.dtype or cfg.model.dtype).value)


def vllm_on_gpu(generator: VLLMConfig, trainer: Trainer) -> Iterator[Part]:
    """The least that vLLM needs of its share of a GPU; it takes all of that for keys and values."""
    weights = vllm_weights(generator, trainer) / generator.tensor_parallel_size
    yield Part("vLLM: weights", weights, precision_of(generator, trainer.cfg))
    precision = FLOAT32 if precision_of(generator, trainer.cfg) == "float32" else BFLOAT16
    tokens = replace(trainer.tokens(1, 1), prompts=1)
    held = activations.cache_bytes(trainer.policy, tokens.length, precision)
    yield Part("vLLM: keys and values", held, f"{in_words(tokens)}; it uses the rest for more")


def parameters(count: int, held: float) -> str:
    """A number of parameters in words, and bytes of each."""
    return f"{millions(count)} parameters x {held / max(1, count):.3g} bytes"


def millions(count: int) -> str:
    """A count with its unit."""
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"


def in_words(tokens: Tokens) -> str:
    """The tokens of a forward."""
    return f"{tokens.sequences} x ({tokens.prompt} + {tokens.response}) tokens"


# -- what is said of it ----------------------------------------------------------------------------


def gib(amount: float) -> str:
    """An amount of memory in words."""
    if amount < 0.1 * GIB:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / GIB:,.0f} GiB" if amount >= 99.5 * GIB else f"{amount / GIB:.1f} GiB"


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
