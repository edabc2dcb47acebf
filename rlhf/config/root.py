"""The root of the configuration.

Only `checks`, `memory`, `assembly`, `stages`, `launch`, `runs.resuming` and `config` import this module.
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from rlhf.config import run
from rlhf.config.algorithms import AlgoConfig, Data, PPOConfig, Trains, ValueFrom
from rlhf.config.environments import EnvironmentConfig
from rlhf.config.generators import GeneratorConfig, WorkerConfig
from rlhf.config.models import BackendConfig, ModelConfig, paths_in
from rlhf.config.schema import Affects, Section, entry, number
from rlhf.config.scorers import LabelsScorerConfig, NoScorerConfig, RewardModelScorerConfig, ScorerConfig
from rlhf.config.tasks import TaskConfig
from rlhf.core.launched import cpu_cores, exported, local_world_size
from rlhf.core.machine import this_machine

# The generator that `generator=auto` stands for, which is the default.
#
# `candidates` returns the generators that this machine can run, and `rlhf.checks.check` selects the first
# with which the config is valid. While a config is composed, conf/generator/auto.yaml reads the selected
# generator from an environment variable, so the processes of a sweep read it too.


SELECTED = "RLHF_GENERATOR"  # environment variable with the selected generator
_EVERYWHERE = "hf"  # the generator that needs neither a GPU nor another package


def best_generator() -> str:
    """Return the selected generator; without a selection, the generator that runs everywhere."""
    return os.environ.get(SELECTED, _EVERYWHERE)


def selecting(name: str) -> AbstractContextManager[None]:
    """Let `generator=auto` select the option `name` during the block, in this process and in its children."""
    return exported(SELECTED, name)


def candidates(gpus: int | None = None, ranks: int | None = None) -> tuple[str, ...]:
    """Return the generators that `generator=auto` may select on a host, in order of preference.

    vLLM needs a GPU: its own if the host has more GPUs than ranks, otherwise that of a single rank. Several
    ranks would have to share their GPUs with one vLLM process each (`generator.per_rank`).

    Args:
        gpus: GPUs of the host; None: GPUs of this machine.
        ranks: ranks on the host; None: ranks on this machine.
    """
    if gpus is None:
        gpus = len(this_machine().gpus)
    if ranks is None:
        ranks = local_world_size()
    if not gpus or importlib.util.find_spec("vllm") is None:
        return (_EVERYWHERE,)
    if gpus > ranks:
        return "vllm", _EVERYWHERE
    return ("vllm_colocated", _EVERYWHERE) if ranks == 1 else (_EVERYWHERE,)


# Resolvers for conf/ values computed from other keys: ${product:128,${schedule.minibatches}}
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("largest", lambda *sizes: max(each or 0 for each in sizes), replace=True)
OmegaConf.register_new_resolver("best_generator", best_generator, replace=True)  # conf/generator/auto.yaml

_MINIMISED = ("eval/loss", "eval/ppl", "eval/kl")  # metrics of an evaluation whose lower values are better


@dataclass(kw_only=True, slots=True)
class Config(Section):
    """The config of a run."""

    affects: ClassVar[Affects] = Affects.nothing

    algo: AlgoConfig = MISSING
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING
    scorer: ScorerConfig = MISSING
    gold: ScorerConfig = MISSING
    generator: GeneratorConfig = MISSING
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    backend: BackendConfig = MISSING
    clock: run.ClockConfig = field(default_factory=run.ClockConfig)
    optim: run.OptimConfig = field(default_factory=run.OptimConfig)
    schedule: run.ScheduleConfig = field(default_factory=run.ScheduleConfig)
    eval: run.EvalConfig = field(default_factory=run.EvalConfig)
    stages: run.StagesConfig = field(default_factory=run.StagesConfig)
    logger: run.LoggersConfig = entry(run.LoggersConfig)
    seed: int = number(1, "seed of everything random in the run", least=0, affects=Affects.result)
    resume: run.Resume = entry(run.Resume.auto)
    save_total_limit: int = number(2, "checkpoints that are kept; a run resumes from the newest", least=1)
    save_generations: bool = entry(False)
    """write every rollout with its scores to generations/ of the run folder"""
    loop: str | None = entry(None, affects=Affects.result, added=True)
    """your training loop, as module:function; null: rlhf.training.loop"""
    hooks: list[str] = entry(list, "your classes, as module:Class, called during training")
    objective_metric: str | None = entry(None)
    """metric that a sweeper optimises; null: eval/win_rate; if answers are checked eval/accuracy; without a
    judge eval/score; otherwise eval/accuracy on pairs or, for SFT, eval/loss"""
    output_dir: str = entry("outputs", "folder in which run folders are created")
    cache_dir: str = entry("outputs/artefacts", "folder of models and pairs that runs make as prerequisites")
    push_to: str | None = entry(None)
    """hub repository <owner>/<name>, to which a finished run uploads its model; a new repository is private
"""
    progress: run.Progress = entry(run.Progress.auto)

    @property
    def data(self) -> Data:
        """The content of one training example. An online algorithm on stored completions reads pairs."""
        if self.generator.rollouts or self.algo.supervised:
            return self.algo.data
        return Data.preferences

    @property
    def reads_pairs(self) -> bool:
        """Whether training reads preference pairs."""
        return self.data is Data.preferences

    @property
    def start_key(self) -> str:
        """The key of the model that training starts from."""
        return "model.base" if self.algo.trains is Trains.base else "model.policy"

    @property
    def start(self) -> str | None:
        """The model that training starts from; None: random weights, or a model that the run makes first."""
        return self.model.base if self.algo.trains is Trains.base else self.model.policy

    @property
    def stand_ins(self) -> bool:
        """Whether tiny stand-ins replace the models and data for which the config names no folder."""
        return self.stages.stand_ins and not (self.task.embedded and self.model.context is not None)

    @property
    def makes_models(self) -> bool:
        """Whether the run first makes the models that it needs and the config does not name."""
        return self.task.embedded or self.stand_ins

    @property
    def has_worker(self) -> bool:
        """Whether the generator samples in a separate process."""
        return self.generator.has_worker(self.worker_lag)

    @property
    def worker_lag(self) -> int:
        """The batches that generators in processes of their own run ahead; 0 with a virtual clock."""
        return 0 if self.clock.virtual else self.schedule.max_lag

    @property
    def value_reward(self) -> str | None:
        """The (first) reward model that a value model may start from; None: the config names none."""
        own = self.scorer.path if isinstance(self.scorer, RewardModelScorerConfig) else None
        return next(iter(paths_in(own or self.model.reward)), None)

    @property
    def value_starts_as(self) -> ValueFrom | None:
        """The weights that the value model starts from; None: the algorithm has no value model."""
        if not isinstance(self.algo, PPOConfig):
            return None
        if self.algo.value_from is not None:
            return self.algo.value_from
        scored = self.scorer.reads_reward or isinstance(self.scorer, RewardModelScorerConfig)
        return ValueFrom.reward if scored else ValueFrom.policy

    @property
    def metric(self) -> str:
        """The metric that a sweeper optimises; its best value is stored in `TrainState.best`.

        The default is the accuracy if answers are checked, the win rate if there is another judge, otherwise
        the score (of a scorer that compares, the win rate against the initial policy), the accuracy on
        held-out pairs, or the held-out loss, whichever the run measures first in this order.
        """
        if self.objective_metric is not None:
            return self.objective_metric
        if self.algo.trains is Trains.reward or self.checks_answers:
            return "eval/accuracy"
        if self.gold.name != "none":
            return "eval/win_rate"
        if self.scores_completions:
            return "eval/win_rate_vs_initial" if self.scorer.compares else "eval/score"
        return "eval/loss" if self.algo.supervised else "eval/accuracy"

    @property
    def minimised(self) -> bool:
        """Whether lower values of `metric` are better."""
        return self.metric in _MINIMISED

    @property
    def scores_completions(self) -> bool:
        """Whether the training scorer can score new completions. Stored labels cannot."""
        stored = isinstance(self.scorer, LabelsScorerConfig | NoScorerConfig)
        return not self.algo.supervised and not stored

    @property
    def checks_answers(self) -> bool:
        """Whether `eval/accuracy` is that of answers: the judge, or else the scorer, verifies."""
        scores = self.scores_completions and self.gold.name == "none"
        return self.algo.trains is not Trains.reward and (self.scorer if scores else self.gold).verifies

    def tie_tolerance(self, scorer: ScorerConfig) -> float:
        """Return the relative difference up to which two scores of `scorer` tie: set, or its default."""
        chosen = self.algo.tie_tolerance
        return scorer.rounding(self.model.dtype) if chosen is None else chosen

    @property
    def episodes_per_update(self) -> int:
        """The number of episodes of one update over all ranks: N times K."""
        return self.schedule.prompts_per_update * self.algo.samples_per_prompt

    @property
    def epochs(self) -> float | None:
        """The passes over the training data; None: `schedule.total_episodes` is the length of the run."""
        if self.schedule.total_episodes is not None:
            return None
        saved = self.generator.rollouts and not self.generator.samples
        default = run.DEFAULT_EPOCHS if self.task.own_data and not saved else None
        return self.schedule.total_epochs or default

    def num_updates(self, examples: int | None = None) -> int:
        """Return the number of updates of the whole run.

        Args:
            examples: the size of the training data; required if the length is set in passes over the data.
        """
        if self.schedule.total_episodes is not None:
            return self.schedule.total_episodes // self.episodes_per_update
        assert self.epochs is not None and examples is not None
        return max(1, round(self.epochs * examples / self.schedule.prompts_per_update))


def to_config(node: DictConfig) -> Config:
    """Return a typed OmegaConf node as an object of section objects.

    Raises:
        OmegaConfBaseException: a required value is missing, or a value has the wrong type.
    """
    made = OmegaConf.to_object(node)
    assert isinstance(made, Config)
    return made


ConfigStore.instance().store(name="root_schema", node=Config)


# CPU threads: how trainer and generator processes share the cores of a machine.


# Variables that torch and tokenizers read when they are imported, as `hydra.job.env_set` in conf/config.yaml.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def set_environment() -> None:
    """Set the variables of `ENVIRONMENT` that are not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def threads(cfg: Config) -> tuple[int | None, int | None]:
    """Return the CPU threads of the trainer and of each generator process; None: the default of torch.

    The trainer and the generator of a rank share the cores of the rank (OMP_NUM_THREADS cores if this
    variable is set). If both run in parallel and the config does not set their threads, each process gets an
    equal share. With `max_lag=0` trainer and generator take turns, and each may use all cores.
    """
    trainer, generator = cfg.backend.threads, cfg.generator
    if not isinstance(generator, WorkerConfig) or not cfg.has_worker:
        return trainer, None
    own, chosen = generator.threads, os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = int(chosen) if chosen.isdigit() else max(1, cpu_cores() // local_world_size())
    if cfg.schedule.max_lag == 0:
        return trainer, own or cores
    n = max(1, generator.replicas)
    if own is None:
        own = max(1, (cores - trainer) // n if trainer else cores // (n + 1))
    return trainer or max(1, cores - n * own), own
