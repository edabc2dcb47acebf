"""The root of the configuration, and the sections that belong to no single part. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from rlhf.config.algo import AlgoConfig, Data, Trains
from rlhf.config.backend import BackendConfig
from rlhf.config.generator import GeneratorConfig
from rlhf.config.logger import LoggersConfig
from rlhf.config.model import ModelConfig
from rlhf.config.run import Progress, Resume, StagesConfig
from rlhf.config.schedule import EvalConfig, OptimConfig, ScheduleConfig
from rlhf.config.schema import Section
from rlhf.config.scorer import ScorerConfig
from rlhf.config.task import TaskConfig

# Sizes that follow from others, in conf/: ${product:128,${schedule.minibatches}}
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)


OmegaConf.register_new_resolver("largest", lambda *sizes: max(sizes), replace=True)


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
