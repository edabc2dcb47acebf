"""The root of the configuration, and the sections that belong to no single part. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from rlhf.engines.config import BackendConfig, Device
from rlhf.generators.config import GeneratorConfig
from rlhf.loggers.config import LoggersConfig
from rlhf.objectives.config import AlgoConfig, Data, Trains
from rlhf.schema import Section, option
from rlhf.scorers.config import ScorerConfig
from rlhf.tasks.config import TaskConfig

# Sizes that follow from others, in conf/: ${product:128,${schedule.minibatches}}
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("largest", lambda *sizes: max(sizes), replace=True)


class Dtype(Enum):
    """What forwards compute in. Weights that are trained stay float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # with the loss scaled, so that small gradients are not 0; GPUs only


class Resume(Enum):
    """What to do with a run folder that exists."""

    auto = "auto"  # go on from its last complete checkpoint
    never = "never"  # move it aside and start again
    must = "must"  # fail where there is nothing to go on from


class Progress(Enum):
    """How progress is shown."""

    auto = "auto"  # live in a terminal, else plain lines
    live = "live"
    plain = "plain"
    off = "off"


class Update(Enum):
    """When a generator takes new weights over."""

    between = "between"  # between requests, in the order in which they were made
    in_flight = "in_flight"  # at once, in the middle of a request too


class LRSchedule(Enum):
    """The course of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class LoRAConfig(Section):
    """Low-rank adapters, trained in place of the weights (Hu et al., arXiv 2106.09685)."""

    rank: int = 0  # of the update of a layer; 0: all weights are trained
    alpha: int = 32  # the update is multiplied by alpha / rank
    targets: list[str] | None = None  # linear layers, by the ends of their names; null: all below the head
    modules_to_save: list[str] = field(default_factory=list)  # modules trained whole, by the ends of names

    def problems(self, cfg: Config) -> Iterator[str]:
        """Numbers out of bounds, a missing library, and a base that nothing keeps."""
        if self.rank < 0:
            yield (
                "model.lora.rank must be >= 0 (the rank of a layer's update; 0: no adapters), "
                f"got {self.rank}; set model.lora.rank=16"
            )
        if self.rank < 1:
            return
        if importlib.util.find_spec("peft") is None:
            yield (
                f"model.lora.rank needs PEFT (it makes the adapters), not installed here, got {self.rank}; "
                "pip install 'rlhf[lora]', or set model.lora.rank=0"
            )
        if self.alpha < 1:
            yield (
                "model.lora.alpha must be >= 1 (the update is multiplied by alpha / rank), "
                f"got {self.alpha}; set model.lora.alpha=32"
            )
        if self.targets == []:
            yield (
                "model.lora.targets must name a layer (nothing would be trained), got []; "
                "set model.lora.targets=null"
            )
        if cfg.algo.trains.name == "base" and cfg.model.base is None:
            yield (
                f"model.lora.rank must be 0 for algo={cfg.algo.name} without model.base (adapters need a "
                f"model that is there already), got {self.rank}; set model.lora.rank=0"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """Settings of adapters that there are not."""
        if self.rank == 0:
            for key, off in (("alpha", 32), ("targets", None), ("modules_to_save", [])):
                if getattr(self, key) != off:
                    yield f"model.lora.{key} has no effect with model.lora.rank=0 (no adapters)"


@option("model", "hub")
@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The models of a run, each a hub name or a local folder."""

    name: str = MISSING
    base: str | None = None  # where sft starts
    policy: str | None = None  # where rl and reward modelling start; null: made by sft (embedded tasks)
    reference: str | None = None  # null: the policy as it starts
    reward: str | None = None  # what scorer=reward_model reads; null: made by algo=reward (embedded tasks)
    tokenizer: str | None = None  # null: the one beside the policy (the base, for sft)
    pad_token: str | None = None  # for tokenizers without one of their own
    dtype: Dtype = Dtype.float32
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    gradient_checkpointing: bool = False  # keep the inputs of blocks alone, and compute the rest again
    shared_prefix: bool = True  # encode a prompt once for its K responses
    attention: str = "sdpa"  # attention implementation of transformers
    trust_remote_code: bool = False

    @property
    def starts_as_reference(self) -> bool:
        """Whether the reference is the policy as it starts."""
        return self.reference in (None, self.policy)

    def problems(self, cfg: Config) -> Iterator[str]:
        """A type that the device or backend does not train in; a model that is neither named nor makeable."""
        if self.dtype is Dtype.float16 and cfg.backend.device is Device.cpu:
            yield float16_needs_gpu("backend.device=cpu")
        if self.dtype is Dtype.float16 and not cfg.backend.scales_loss:
            yield (
                f"model.dtype must be float32 or bfloat16 with backend={cfg.backend.name} (it does not scale "
                "the loss, without which small gradients are 0), got float16; set model.dtype=bfloat16"
            )
        if cfg.makes_models:
            return
        wanted = {"base": self.base} if cfg.algo.trains.name == "base" else {"policy": self.policy}
        if cfg.scorer.reads_reward and not cfg.algo.supervised:
            wanted["reward"] = self.reward
        for key, value in wanted.items():
            if value is None:
                yield (
                    f"model.{key} must name a model for task={cfg.task.name} (only embedded tasks make their "
                    f"own), got null; set model.{key}=<hub name or folder>"
                )


def float16_needs_gpu(found: str) -> str:
    """The error for float16 on a CPU."""
    return (
        f"model.dtype must be float32 or bfloat16 without a GPU ({found}; CPUs do not train in float16), got "
        "float16; set model.dtype=bfloat16"
    )


@option("model", "nano")
@dataclass(kw_only=True, slots=True)
class NanoConfig(ModelConfig):
    """A GPT-NeoX (Pythia) small enough for a laptop's CPU, made from nothing where `base` is null."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 512  # positions

    def problems(self, cfg: Config) -> Iterator[str]:
        """Heads that do not divide the width."""
        yield from ModelConfig.problems(self, cfg)
        if self.heads < 1 or self.hidden_size % self.heads:
            yield (
                f"model.hidden_size must be divisible by model.heads (each head has an equal part), "
                f"got {self.hidden_size} and {self.heads}; set model.heads=4"
            )


@dataclass(kw_only=True, slots=True)
class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = MISSING
    schedule: LRSchedule = LRSchedule.linear
    warmup: float = 0.0  # optimizer steps; below 1: fraction of the run
    max_grad_norm: float | None = 1.0  # null: no clipping
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(Section):
    """How long, how much at once, how far off-policy.

    `eval_every`, `save_every`, `log_every` are in updates; below 1: a fraction of the run; 0: never.
    """

    total_episodes: int | None = None  # of the whole run
    total_epochs: float | None = None  # supervised only, instead of total_episodes
    prompts_per_update: int = MISSING  # N, over all ranks
    minibatches: int = 1  # optimizer steps in one pass over a rollout batch (the paper's N)
    epochs: int = 1  # passes over a rollout batch (the paper's T)
    max_lag: int = 0  # later requests in flight
    update: Update = Update.between  # when the generator takes new weights over
    eval_every: float = 0.2
    save_every: float = 0.25
    log_every: float = 1

    @property
    def in_flight(self) -> bool:
        """Whether weights change while requests are running."""
        return self.update is Update.in_flight

    def problems(self, cfg: Config) -> Iterator[str]:
        """Weights that cannot change while a request is running."""
        if not self.in_flight:
            return
        if self.max_lag < 1:
            yield (
                "schedule.max_lag must be >= 1 with schedule.update=in_flight (else none is running when "
                f"weights change), got {self.max_lag}; set schedule.max_lag=1"
            )
        elif not cfg.generator.has_worker(cfg):
            yield (
                "schedule.update must be between without a generator in a process of its own (no other can "
                f"take weights over while it samples), got in_flight with generator={cfg.generator.name}; "
                "set schedule.update=between"
            )

    def warnings(self, cfg: Config) -> Iterator[str]:
        """A run that cannot be repeated."""
        if self.in_flight:
            yield (
                "schedule.update=in_flight makes a run depend on timing (which weights sample a token): two "
                "equal runs will differ, and so will one that goes on from a checkpoint"
            )


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation during training."""

    prompts: int = 256  # held-out examples
    batch_size: int = 256  # sequences decoded at once where the generator does not sample
    temperature: float = 0.01  # near-greedy, as the paper's
    samples: int = 3  # rows of the table shown in the terminal


@dataclass(kw_only=True, slots=True)
class StagesConfig(Section):
    """How what a run does not name is made: SFT model, preference pairs, reward model.

    Embedded tasks train them; `sft` and `reward` are overrides of those stages, as on a command line. Other
    tasks have theirs from the hub, or, to try a recipe offline, stand-ins.
    """

    seed: int = 0  # of every stage; the run's own seed leaves them alone
    sft: list[str] = field(default_factory=list)
    reward: list[str] = field(default_factory=list)
    pairs: int = 4096  # prompts that two responses are sampled for
    pairs_temperature: float = 0.7
    stand_ins: bool = False  # tiny random models, and data made up, where a task of the hub names no folder


@dataclass(kw_only=True, slots=True)
class Config(Section):
    """A run."""

    algo: AlgoConfig = MISSING
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING
    scorer: ScorerConfig = MISSING
    gold: ScorerConfig = MISSING
    generator: GeneratorConfig = MISSING
    backend: BackendConfig = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    logger: LoggersConfig = field(default_factory=LoggersConfig)
    seed: int = 1
    resume: Resume = Resume.auto
    save_total_limit: int = 2  # checkpoints kept
    save_generations: bool = False  # every rollout with its scores, in generations/ of the run folder
    objective_metric: str | None = None  # what a sweeper optimises; null: win-rate (algo=reward: accuracy)
    output_dir: str = "outputs"
    cache_dir: str = "outputs/artefacts"  # models and pairs that embedded tasks make on the way
    progress: Progress = Progress.auto

    @property
    def data(self) -> Data:
        """What one training example holds; an online algorithm on stored completions reads pairs."""
        if self.generator.rollouts or self.algo.supervised:
            return self.algo.data
        return Data.preferences

    @property
    def start(self) -> str | None:
        """The model that training starts from; None: one made from nothing, or on the way."""
        return self.model.base if self.algo.trains is Trains.base else self.model.policy

    @property
    def stand_ins(self) -> bool:
        """Whether what it does not name is replaced by stand-ins."""
        return self.stages.stand_ins and not self.task.embedded

    @property
    def makes_models(self) -> bool:
        """Whether models that it does not name are made on the way."""
        return self.task.embedded or self.stand_ins

    @property
    def metric(self) -> str:
        """What a sweeper optimises, and whose best value is kept."""
        default = "eval/accuracy" if self.algo.trains is Trains.reward else "eval/win_rate"
        return self.objective_metric or default

    @property
    def episodes_per_update(self) -> int:
        """N times K, over all ranks."""
        return self.schedule.prompts_per_update * self.algo.samples_per_prompt

    def num_updates(self, examples: int | None = None) -> int:
        """Updates of the whole run; `examples` (size of the training data) is needed with `total_epochs`."""
        if self.schedule.total_episodes is not None:
            return self.schedule.total_episodes // self.episodes_per_update
        assert self.schedule.total_epochs is not None and examples is not None
        return max(1, round(self.schedule.total_epochs * examples / self.schedule.prompts_per_update))


ConfigStore.instance().store(name="root_schema", node=Config)
